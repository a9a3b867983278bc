"""The tokenizer: a Hugging Face byte-level BPE that keeps control tokens out of ordinary text.

Two Rust tokenizers are built from one `tokenizer.json`: the whole one, and a plain one without any
added token. Text is only ever encoded by the plain one, so no text can become a control token.
Decoding goes through a table of bytes per token: it is exact, and needs no Rust call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers
from blake3 import blake3
from numpy.typing import NDArray
from tokenizers import AddedToken

from etude.errors import CheckpointError, ConfigError
from etude.kit.durable import write_text
from etude.tokens.pieces import Control, Piece

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
_COMPANIONS = (TEMPLATE_FILE, GENERATION_FILE, "special_tokens_map.json")
"""Texts beside a tokenizer without which a model is not spoken to as it was trained."""
_CACHED_CHARACTERS = 1024
_CACHE_ENTRIES = 4096


class Tokenizer:
    """Text to token ids and back. Immutable; may be shared by all sessions of one event loop.

    Only byte-level tokenizers are taken (GPT-2, Llama 3, Qwen, DeepSeek and our own): their tokens are byte
    strings that can be decoded one by one. Unicode normalisation, if the definition asks for any, is left
    out: a file is encoded as it is.
    """

    def __init__(
        self,
        definition: str,
        config: Mapping[str, Any] | None = None,
        companions: Mapping[str, str] | None = None,
    ) -> None:
        """`definition` is the text of a `tokenizer.json`, `config` what `tokenizer_config.json` holds.
        `companions`: by name, the texts of other files that are kept with it: chat template, generation
        settings.

        Raises ConfigError if the definition is not byte-level or its plain text yields control tokens.
        """
        parsed = _parse(definition)
        self._definition = json.dumps(parsed, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        self._config = dict(config or {})
        self._companions = dict(companions or {})
        added = parsed.get("added_tokens") or []
        self._added = {token["content"]: int(token["id"]) for token in added}
        self._control = {int(token["id"]): Control(token["content"]) for token in added if token["special"]}
        self._plain = _build(json.dumps(_without_added_tokens(parsed)))
        self._bytes = _byte_table(self._plain.get_vocab(with_added_tokens=False), self._added)
        self._byte_ids = {piece[0]: index for index, piece in enumerate(self._bytes) if len(piece) == 1}
        self._cache: dict[str, NDArray[np.int32]] = {}
        self._check_plain_text()

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes)

    @cached_property
    def longest_bytes(self) -> int:
        """Of the bytes that one token stands for: so many bytes of text are at least one token."""
        return max((len(piece) for piece in self._bytes), default=1) or 1

    @cached_property
    def digest(self) -> str:
        """BLAKE3 hex digest of the definition in canonical JSON."""
        return blake3(self._definition.encode()).hexdigest()

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Names of the control tokens, in the order of their ids."""
        return tuple(self._control[index].name for index in sorted(self._control))

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Names of all tokens beside the BPE model's, special or not."""
        return tuple(self._added)

    @property
    def chat_template(self) -> str:
        """The Jinja template that the model was published with, of several the one for tools; or empty."""
        own = self._companions.get(TEMPLATE_FILE) or self._config.get("chat_template") or ""
        if not isinstance(own, list):
            return str(own)
        named = {str(one.get("name")): str(one.get("template")) for one in own if isinstance(one, dict)}
        return named.get("tool_use") or named.get("default") or ""

    @property
    def template_variables(self) -> dict[str, str]:
        """The special tokens that chat templates name, such as `bos_token`."""
        values = {name: value for name, value in self._config.items() if name.endswith("_token")}
        texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in values.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        if source == self.chat_template:
            return self
        config = {name: value for name, value in self._config.items() if name != "chat_template"}
        return Tokenizer(self._definition, config, {**self._companions, TEMPLATE_FILE: source})

    def has_control(self, name: str) -> bool:
        """Whether `control_id(name)` would succeed."""
        return name in self._added

    def ending_with(self, end: int) -> Tokenizer:
        """The same, with a control token's id among those that end an answer in `generation_config.json`.

        Raises CheckpointError for a damaged one.
        """
        try:
            kept = json.loads(self._companions.get(GENERATION_FILE, "{}"))
        except ValueError as error:
            raise CheckpointError(
                f"is not JSON: {error}", field=GENERATION_FILE, fix="fetch it again, or remove it"
            ) from error
        ends = kept.get("eos_token_id", [])
        ends = ends if isinstance(ends, list) else [ends]
        if end in ends:
            return self
        text = json.dumps({**kept, "eos_token_id": [end, *ends]}, indent=2) + "\n"
        return Tokenizer(self._definition, self._config, {**self._companions, GENERATION_FILE: text})

    def control_id(self, name: str) -> int:
        """Id of the control token called `name`. Raises ConfigError if there is none."""
        try:
            return self._added[name]
        except KeyError:
            raise ConfigError(
                "the tokenizer has no such control token",
                field="tokenizer",
                received=name,
                fix="add it with Tokenizer.with_control_tokens, or train the tokenizer with it",
            ) from None

    def encode(self, text: str | bytes) -> NDArray[np.int32]:
        """Token ids [n] of ordinary text; never a control token. The array is shared: do not write to it.

        Bytes that are not UTF-8 (in `bytes`, or as surrogate escapes in `str`) become one token each.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        known = self._cache.get(text)
        if known is not None:
            return known
        try:
            ids = np.asarray(self._plain.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        except TypeError:  # how the Rust side refuses lone surrogates
            ids = self._encode_escaped(text)
        ids.flags.writeable = False
        if len(text) <= _CACHED_CHARACTERS:
            if len(self._cache) >= _CACHE_ENTRIES:
                self._cache.clear()
            self._cache[text] = ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`encode` of many texts at once, on all cores. The texts must be valid Unicode."""
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode_bytes(self, ids: Sequence[int] | NDArray[np.int32], skip_control: bool = False) -> bytes:
        """The exact bytes that the tokens stand for; a control token stands for its name."""
        table = self._bytes
        listed = self._known(ids)
        if skip_control:
            control = self._control
            return b"".join([table[index] for index in listed if index not in control])
        return b"".join([table[index] for index in listed])

    def decode(self, ids: Sequence[int] | NDArray[np.int32], skip_control: bool = False) -> str:
        """The tokens as text. A byte sequence that is not UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids, skip_control).decode("utf-8", "replace")

    def pieces(
        self, ids: Sequence[int] | NDArray[np.int32], tags: Mapping[int, Control] | None = None
    ) -> list[Piece]:
        """The tokens as alternating text and control tokens; for `tags` see `byte_pieces`."""
        return [
            piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece
            for piece in self.byte_pieces(ids, tags)
        ]

    def byte_pieces(
        self, ids: Sequence[int] | NDArray[np.int32], tags: Mapping[int, Control] | None = None
    ) -> list[bytes | Control]:
        """The tokens as alternating bytes and control tokens, so that characters may be cut anywhere.

        `tags` (see `tag_ids`) are taken for control tokens even where the tokenizer does not call them
        special, as Qwen's `<tool_call>`.
        """
        control, table = self._control, self._bytes
        pieces: list[bytes | Control] = []
        run: list[bytes] = []
        for index in self._known(ids):
            name = control.get(index)
            if name is None and tags:
                name = tags.get(index)
            if name is None:
                run.append(table[index])
                continue
            if run:
                pieces.append(b"".join(run))
                run = []
            pieces.append(name)
        if run:
            pieces.append(b"".join(run))
        return pieces

    def tag_ids(self, names: Iterable[str]) -> dict[int, Control]:
        """Those of the names that the tokenizer holds as one token, special or not, by their ids."""
        return {self._added[name]: Control(name) for name in names if name in self._added}

    def with_control_tokens(self, names: Sequence[str]) -> Tokenizer:
        """A tokenizer that also has these control tokens, appended after the present vocabulary."""
        whole = tokenizers.Tokenizer.from_str(self._definition)
        new = [name for name in names if name not in self._added]
        whole.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in new])
        return Tokenizer(whole.to_str(), self._config, self._companions)

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and what is kept with them, as AutoTokenizer reads
        them.

        Atomically, and `tokenizer.json` last: where that is, the whole tokenizer is.
        """
        directory.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self._config, ensure_ascii=False, indent=2)
        for name, text in self._companions.items():
            write_text(directory / name, text)
        write_text(directory / CONFIG_FILE, config + "\n")
        write_text(directory / TOKENIZER_FILE, self._definition)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads a Hugging Face directory. Raises ConfigError if there is no whole `tokenizer.json`."""
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(
                "no such file",
                field="tokenizer",
                received=str(path),
                fix="name a directory that holds a tokenizer.json",
            )
        config_path = directory / CONFIG_FILE
        config = _parse_json(_read_text(config_path), CONFIG_FILE) if config_path.is_file() else {}
        beside = {name: directory / name for name in _COMPANIONS}
        texts = {name: _read_text(file) for name, file in beside.items() if file.is_file()}
        return cls(_read_text(path), config, texts)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str, dict[str, Any], dict[str, str]]]:
        return Tokenizer, (self._definition, self._config, self._companions)

    def _known(self, ids: Sequence[int] | NDArray[np.int32]) -> list[int]:
        """Without ids beyond the vocabulary: models that pad theirs can sample them, they are no bytes."""
        size = len(self._bytes)
        return [index for index in (ids.tolist() if isinstance(ids, np.ndarray) else ids) if index < size]

    def _encode_escaped(self, text: str) -> NDArray[np.int32]:
        """Encodes text with lone surrogates: escaped bytes one token each, what else is invalid as `?`."""
        ids: list[int] = []
        for part in re.split("([\udc80-\udcff])", text):
            if len(part) == 1 and "\udc80" <= part <= "\udcff":
                ids.append(self._byte_ids[ord(part) - 0xDC00])
            elif part:
                valid = part.encode("utf-8", "replace").decode("utf-8")
                ids.extend(self._plain.encode(valid, add_special_tokens=False).ids)
        return np.asarray(ids, dtype=np.int32)

    def _check_plain_text(self) -> None:
        for index, control in self._control.items():
            if index in self._plain.encode(control.name, add_special_tokens=False).ids:
                raise ConfigError(
                    "ordinary text would produce a control token",
                    field="tokenizer",
                    received=control.name,
                    fix="keep control tokens out of the BPE model's vocabulary",
                )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"not UTF-8: {error}", field="tokenizer", received=str(path), fix=f"use a whole {path.name}"
        ) from None


def _parse_json(text: str, name: str) -> dict[str, Any]:
    """The object that a file of this name holds."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}", field="tokenizer", fix=f"use a whole {name}") from None
    if not isinstance(parsed, dict):
        raise ConfigError("not a JSON object", field="tokenizer", fix=f"use a whole {name}")
    return cast(dict[str, Any], parsed)


def _parse(definition: str) -> dict[str, Any]:
    parsed = _parse_json(definition, TOKENIZER_FILE)
    decoder = parsed.get("decoder") or {}
    if decoder.get("type") != "ByteLevel" or (parsed.get("model") or {}).get("type") != "BPE":
        raise ConfigError(
            "only byte-level BPE tokenizers are lossless",
            field="tokenizer.decoder",
            received=decoder.get("type"),
            fix="use a model whose tokenizer.json has a ByteLevel decoder",
        )
    return parsed


def _build(definition: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the Rust side raises nothing more precise
        raise ConfigError(
            f"cannot be read: {error}",
            field="tokenizer",
            fix=f"use a {TOKENIZER_FILE} that tokenizers {tokenizers.__version__} reads",
        ) from error


def _without_added_tokens(parsed: Mapping[str, Any]) -> dict[str, Any]:
    left_out = dict.fromkeys(("normalizer", "post_processor", "truncation", "padding"))
    return {**parsed, **left_out, "added_tokens": []}


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    characters.update({chr(256 + offset): byte for offset, byte in enumerate(rest)})
    return characters


def _byte_table(vocabulary: Mapping[str, int], added: Mapping[str, int]) -> list[bytes]:
    """The bytes of every token id; ids that nothing uses stand for no bytes."""
    size = max([*vocabulary.values(), *added.values()], default=-1) + 1
    table = [b""] * size
    characters = _byte_characters()
    for token, index in vocabulary.items():
        if all(character in characters for character in token):
            table[index] = bytes(characters[character] for character in token)
        else:  # a marker that stands in the vocabulary under its own name
            table[index] = token.encode()
    for name, index in added.items():
        table[index] = name.encode()
    return table
