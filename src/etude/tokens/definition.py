"""Parses a `tokenizer.json`: the bytes of each token, the tokens that text may become, and where a space is
put before text.

Two kinds of BPE decode losslessly to bytes, and both are supported: byte-level ones, and SentencePiece's,
which write spaces as `▁` and have a token `<0xNN>` for every byte. The latter may put a space of their own
before text: before all text that follows a control token (Llama 2, Phi-3) or at the very start (Mistral).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from etude.errors import ConfigError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a space."""
_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
_LEFT_OUT = ("NFC", "NFD", "NFKC", "NFKD", "Precompiled")
"""Normalisations that change text; they are left out: a file is encoded as it is."""
_FLAGS = ("special", "lstrip", "rstrip", "single_word")
_WORDS = re.compile(
    rf"[ {SPACE}\n\t]+|</?(?:a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li"
    r"|s|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
"""Runs of blanks and HTML tags, which Gemma's vocabulary holds as words that are always split off whole."""
_MARKS_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPENDS_SPACE = {"type": "Prepend", "prepend": SPACE}

Where = Literal["never", "first", "always"]


@dataclass(frozen=True, slots=True)
class Definition:
    """The parts of a parsed definition."""

    plain: Mapping[str, Any]
    """The definition that encodes ordinary text, and never yields a mark."""
    marks: Mapping[str, int]
    """Added tokens that text never yields, by name: control tokens, and tags such as `<tool_call>`."""
    is_sentencepiece: bool = False
    space_before: Where = "never"
    """Where the tokenizer puts a space before text: nowhere, at the start, or after every mark."""
    doubles_space: bool = False
    """Whether it does so even if the text begins with a space."""

    def bytes_of(self, vocabulary: Mapping[str, int]) -> list[bytes]:
        """The bytes of every token id; an unused id has no bytes, a mark those of its name."""
        spell = _sentencepiece_bytes if self.is_sentencepiece else _byte_level_bytes
        table = [b""] * (max([*vocabulary.values(), *self.marks.values()], default=-1) + 1)
        for token, index in vocabulary.items():
            table[index] = spell(token)
        for name, index in self.marks.items():
            table[index] = name.encode()
        return table


def read_definition(parsed: Mapping[str, Any]) -> Definition:
    """Parses a definition. Raises ConfigError for a tokenizer that does not decode losslessly."""
    model = parsed.get("model") or {}
    added: list[dict[str, Any]] = list(parsed.get("added_tokens") or [])
    dropped = dict.fromkeys(("post_processor", "truncation", "padding"))
    if model.get("type") == "BPE" and (parsed.get("decoder") or {}).get("type") == "ByteLevel":
        marks = {token["content"]: int(token["id"]) for token in added}
        return Definition({**parsed, **dropped, "normalizer": None, "added_tokens": []}, marks)
    vocabulary = model.get("vocab") or {}
    missing = [
        byte for name, byte in _BYTES.items() if name not in vocabulary and chr(byte) not in vocabulary
    ]
    if model.get("type") != "BPE" or not model.get("byte_fallback") or missing:
        raise ConfigError(
            "is neither a byte-level BPE nor has a token for every byte: decoding would change text",
            field="tokenizer.json: model.type",
            received=model.get("type"),
            fix="use a model whose tokenizer.json has a ByteLevel decoder, or tokens <0x00> to <0xFF>",
        )
    texts = [token for token in added if _is_text(token, vocabulary)]
    known = {token["content"] for token in texts}
    marks = {token["content"]: int(token["id"]) for token in added if token["content"] not in known}
    normalizers = _parts(parsed.get("normalizer"), "normalizers")
    cutters = _parts(parsed.get("pre_tokenizer"), "pretokenizers")
    for part in normalizers:
        if part not in (_MARKS_SPACES, _PREPENDS_SPACE) and part["type"] not in _LEFT_OUT:
            raise ConfigError(
                "changes text before encoding, so decoding would not restore it",
                field="tokenizer.json: normalizer",
                received=part["type"],
                fix="use a model whose tokenizer only replaces spaces",
            )
    scheme: Where = "always" if _PREPENDS_SPACE in normalizers else "never"
    for part in cutters:
        if part["type"] == "Metaspace":
            old = "always" if part.pop("add_prefix_space", True) else "never"
            scheme = part.get("prepend_scheme", old)
            part["prepend_scheme"] = "never"
    return Definition(
        {
            **parsed,
            **dropped,
            "normalizer": _MARKS_SPACES if _MARKS_SPACES in normalizers else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cutters} if cutters else None,
            "added_tokens": texts,
        },
        marks,
        is_sentencepiece=True,
        space_before=scheme,
        doubles_space=_PREPENDS_SPACE in normalizers,
    )


def _parts(part: Mapping[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The flattened parts of a normalizer or a pre-tokenizer."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [dict(part)]
    return [leaf for inner in part[key] for leaf in _parts(inner, key)]


def _is_text(token: Mapping[str, Any], vocabulary: Mapping[str, int]) -> bool:
    name, is_special = token["content"], any(token.get(flag) for flag in _FLAGS)
    return not is_special and name in vocabulary and _WORDS.fullmatch(name) is not None


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTES.get(token)
    return token.replace(SPACE, " ").encode() if byte is None else bytes([byte])


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    characters.update({chr(256 + offset): byte for offset, byte in enumerate(rest)})
    return characters


_CHARACTERS = _byte_characters()


def _byte_level_bytes(token: str) -> bytes:
    if all(character in _CHARACTERS for character in token):
        return bytes(_CHARACTERS[character] for character in token)
    return token.encode()  # a marker that is in the vocabulary under its own name
