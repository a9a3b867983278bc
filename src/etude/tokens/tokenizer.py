"""The tokenizer: a Hugging Face BPE, byte-level or SentencePiece's, that keeps control tokens out of ordinary
text.

Text is encoded by a plain tokenizer without the control tokens of its `tokenizer.json`, so no text can become
one. Decoding uses a table of bytes per token: it is exact, and needs no Rust call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers
from blake3 import blake3
from numpy.typing import NDArray
from tokenizers import AddedToken

from etude.errors import CheckpointError, ConfigError
from etude.kit.durable import read_record, write_text
from etude.kit.git import lfs_fix
from etude.tokens.definition import SPACE, read_definition
from etude.tokens.pieces import Control, Piece

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_COMPANIONS = (TEMPLATE_FILE, GENERATION_FILE, "special_tokens_map.json")
"""Files next to a tokenizer that are needed to prompt a model as it was trained."""
_PROBE = "a  b\n\n\tc\r\n    d <h1> ß🙂漢字 e\u0301 \n "
_CACHED_CHARACTERS = 1024
_CACHE_ENTRIES = 4096


class Tokenizer:
    """Text to token ids and back. Immutable; may be shared by all sessions of one event loop.

    Tokens are byte strings that can be decoded one by one: those of byte-level tokenizers (GPT-2, Llama 3,
    Qwen, DeepSeek and our own), and of SentencePiece's with a token for every byte (Llama 2, Mistral, Gemma,
    Phi-3). Unicode normalisation, if the definition asks for any, is left out: a file is encoded as it is.
    The space that some of the latter put before text is not part of the text: see `lead`.
    """

    def __init__(
        self,
        definition: str,
        config: Mapping[str, Any] | None = None,
        companions: Mapping[str, str] | None = None,
    ) -> None:
        """`definition`: the text of a `tokenizer.json`; `config`: the content of `tokenizer_config.json`;
        `companions`: texts of other files that are kept with it, by name: chat template, generation settings.

        Raises ConfigError if the definition does not decode losslessly, or plain text yields control tokens.
        """
        parsed = _parse_json(definition, TOKENIZER_FILE)
        self._definition = json.dumps(parsed, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        self._config = dict(config or {})
        self._companions = dict(companions or {})
        read = self._read = read_definition(parsed)
        self._added = read.marks
        added = parsed.get("added_tokens") or []
        self._control = {int(token["id"]): Control(token["content"]) for token in added if token["special"]}
        names = [
            r"\s*" * token.get("lstrip", False)
            + re.escape(token["content"])
            + r"\s*" * token.get("rstrip", False)
            for token in added
            if token.get("lstrip") or token.get("rstrip")
        ]
        self._strippers = re.compile("|".join(names)) if names else None
        self._plain = _build(json.dumps(read.plain))
        self._bytes = read.bytes_of(self._plain.get_vocab(with_added_tokens=False))
        self._byte_ids = {piece[0]: index for index, piece in enumerate(self._bytes) if len(piece) == 1}
        spelled_out = f"([{SPACE}\udc80-\udcff])" if read.is_sentencepiece else "([\udc80-\udcff])"
        self._spelled_out = re.compile(spelled_out)
        self._cache: dict[str, NDArray[np.int32]] = {}
        self._check_plain_text()

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes)

    @cached_property
    def longest_bytes(self) -> int:
        """Most bytes of one token: text of this length is at least one token."""
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
        """Names of all tokens besides the BPE model's, special or not."""
        return tuple(self._added)

    @property
    def chat_template(self) -> str:
        """The published Jinja template of the model, of several the one for tools; or ""."""
        own = self._companions.get(TEMPLATE_FILE) or self._config.get("chat_template") or ""
        if not isinstance(own, list):
            return str(own)
        named = {str(part.get("name")): str(part.get("template")) for part in own if isinstance(part, dict)}
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
        return self._with_files(config, {**self._companions, TEMPLATE_FILE: source})

    def _with_files(self, config: dict[str, Any], companions: dict[str, str]) -> Tokenizer:
        """The same tokenizer with other accompanying files."""
        other = copy(self)
        other._config, other._companions = config, companions
        return other

    def strip_blanks(self, text: str) -> str:
        """Rendered text without the blanks that control tokens strip around themselves, as Phi-3's do."""
        return text if self._strippers is None else self._strippers.sub(lambda found: found[0].strip(), text)

    def has_control(self, name: str) -> bool:
        """Whether `control_id(name)` would succeed."""
        return name in self._added

    def with_end_tokens(self, tokens: Sequence[int]) -> Tokenizer:
        """The same tokenizer, with these control tokens added to the end tokens in `generation_config.json`.

        Raises CheckpointError if that file is damaged.
        """
        try:
            kept = json.loads(self._companions.get(GENERATION_FILE, "{}"))
        except ValueError as error:
            raise CheckpointError(
                f"is not JSON: {error}", field=GENERATION_FILE, fix="fetch it again, or remove it"
            ) from error
        ends = kept.get("eos_token_id", [])
        ends = ends if isinstance(ends, list) else [ends]
        if not (missing := [token for token in tokens if token not in ends]):
            return self
        text = json.dumps({**kept, "eos_token_id": [*missing, *ends]}, indent=2) + "\n"
        return self._with_files(self._config, {**self._companions, GENERATION_FILE: text})

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

        Bytes that are not UTF-8 (in `bytes`, or as surrogate escapes in `str`) become one token each. So do
        those of the character by which SentencePiece marks spaces, which it would read as a space.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        known = self._cache.get(text)
        if known is not None:
            return known
        try:
            if self._read.is_sentencepiece and SPACE in text:
                ids = self._encode_parts(text)
            else:
                ids = np.asarray(self._plain.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        except TypeError:  # how the Rust side refuses lone surrogates
            ids = self._encode_parts(text)
        ids.flags.writeable = False
        if len(text) <= _CACHED_CHARACTERS:
            if len(self._cache) >= _CACHE_ENTRIES:
                self._cache.clear()
            self._cache[text] = ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`encode` of many texts at once, on all cores. The texts must be valid Unicode."""
        if self._read.is_sentencepiece and any(SPACE in text for text in texts):
            return [self.encode(text) for text in texts]
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def lead(self, text: str, after: Piece | None = None) -> str:
        """The text with the space that the tokenizer puts before it, if it does so after `after`: a control
        token, text, or nothing (None: the very start)."""
        if isinstance(after, str) or not text or (text[0] == " " and not self._read.doubles_space):
            return text
        where = self._read.space_before
        return f" {text}" if where == "always" or (where == "first" and after is None) else text

    def decode_bytes(self, ids: Sequence[int] | NDArray[np.int32], skip_control: bool = False) -> bytes:
        """The exact bytes of the tokens; of a control token those of its name."""
        table, left_out = self._bytes, self._control if skip_control else ()
        return b"".join([table[index] for index in self._known(ids) if index not in left_out])

    def decode(self, ids: Sequence[int] | NDArray[np.int32], skip_control: bool = False) -> str:
        """The tokens as text. A byte sequence that is not UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids, skip_control).decode("utf-8", "replace")

    def pieces(
        self,
        ids: Sequence[int] | NDArray[np.int32],
        tags: Mapping[int, Control] | None = None,
        after: Piece = "",
    ) -> list[Piece]:
        """The tokens as alternating text and control tokens; for `tags` and `after` see `byte_pieces`."""
        return [
            piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece
            for piece in self.byte_pieces(ids, tags, after)
            if piece
        ]

    def byte_pieces(
        self,
        ids: Sequence[int] | NDArray[np.int32],
        tags: Mapping[int, Control] | None = None,
        after: bytes | Piece = b"",
    ) -> list[bytes | Control]:
        """The tokens as alternating bytes and control tokens, so that characters may be split anywhere.

        `tags` (see `tag_ids`) count as control tokens even if the tokenizer does not call them special, as
        Qwen's `<tool_call>`. The space that the tokenizer puts before text after a control token (here or
        `after`) is removed; the text may become empty.
        """
        control, table, tags = self._control, self._bytes, tags or {}
        pieces: list[bytes | Control] = []
        for mark, run in groupby(self._known(ids), lambda index: control.get(index) or tags.get(index)):
            listed = list(run)
            pieces += [b"".join([table[index] for index in listed])] if mark is None else [mark] * len(listed)
        if self._read.space_before == "always":
            before = (after, *pieces)
            pieces = [
                piece.removeprefix(b" ") if isinstance(piece, bytes) and isinstance(last, Control) else piece
                for last, piece in zip(before, pieces, strict=False)
            ]
        return pieces

    def tag_ids(self, names: Iterable[str]) -> dict[int, Control]:
        """The names that the tokenizer holds as one token, special or not, by their ids."""
        return {self._added[name]: Control(name) for name in names if name in self._added}

    def with_control_tokens(self, names: Sequence[str]) -> Tokenizer:
        """A tokenizer with these control tokens appended to the vocabulary."""
        whole = tokenizers.Tokenizer.from_str(self._definition)
        new = [name for name in names if name not in self._added]
        whole.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in new])
        return Tokenizer(whole.to_str(), self._config, self._companions)

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and their companions, as AutoTokenizer reads them.

        Each file atomically, and `tokenizer.json` last: if it exists, the tokenizer is complete.
        """
        directory.mkdir(parents=True, exist_ok=True)
        # A family's own class would build its own tokenizer, which may split text differently.
        reads = {"tokenizer_class": "PreTrainedTokenizerFast"} if self._read.is_sentencepiece else {}
        config = json.dumps({**self._config, **reads}, ensure_ascii=False, indent=2)
        for name, text in self._companions.items():
            write_text(directory / name, text)
        write_text(directory / CONFIG_FILE, config + "\n")
        write_text(directory / TOKENIZER_FILE, self._definition)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads a Hugging Face directory. Raises ConfigError if there is no whole `tokenizer.json`.

        Begin, end and padding tokens that only its `config.json` names are added to
        `generation_config.json`."""
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
        model, kept = (read_record(directory / name) for name in ("config.json", GENERATION_FILE))
        alone = {name: model[name] for name in _TOKEN_IDS if model.get(name) is not None and name not in kept}
        if alone and (kept or GENERATION_FILE not in texts):
            texts[GENERATION_FILE] = json.dumps(alone | kept, indent=2) + "\n"
        return cls(_read_text(path), config, texts)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str, dict[str, Any], dict[str, str]]]:
        return Tokenizer, (self._definition, self._config, self._companions)

    def _known(self, ids: Sequence[int] | NDArray[np.int32]) -> list[int]:
        """Drops ids beyond the vocabulary, which have no bytes; models with padded vocabularies can sample
        them."""
        size = len(self._bytes)
        return [index for index in (ids.tolist() if isinstance(ids, np.ndarray) else ids) if index < size]

    def _encode_parts(self, text: str) -> NDArray[np.int32]:
        """Encodes text with lone surrogates or SentencePiece's mark of a space: escaped bytes and those of
        the mark become one token each, other invalid characters `?`."""
        ids: list[int] = []
        for part in self._spelled_out.split(text):
            if self._spelled_out.fullmatch(part):
                ids.extend(self._byte_ids[byte] for byte in part.encode("utf-8", "surrogateescape"))
            elif part:
                valid = part.encode("utf-8", "replace").decode("utf-8")
                ids.extend(self._plain.encode(valid, add_special_tokens=False).ids)
        return np.asarray(ids, dtype=np.int32)

    def _check_plain_text(self) -> None:
        if self._read.is_sentencepiece and self.decode(self.encode(_PROBE)) != _PROBE:
            raise ConfigError(
                "does not restore text when decoding",
                field="tokenizer.json: pre_tokenizer",
                received=self.decode(self.encode(_PROBE)),
                fix="use a model whose tokenizer keeps all characters",
            )
        for index, control in self._control.items():
            if index in self._plain.encode(control.name, add_special_tokens=False).ids:
                raise ConfigError(
                    "ordinary text would produce a control token",
                    field="tokenizer",
                    received=control.name,
                    fix="keep control tokens out of the BPE model's vocabulary",
                )


def _read_text(path: Path) -> str:
    if fix := lfs_fix(path):
        raise ConfigError("is only a pointer to the file", field="tokenizer", received=str(path), fix=fix)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"not UTF-8: {error}", field="tokenizer", received=str(path), fix=f"use a complete {path.name}"
        ) from None


def _parse_json(text: str, name: str) -> dict[str, Any]:
    """The JSON object in the text of a file of this name."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}", field="tokenizer", fix=f"use a complete {name}") from None
    if not isinstance(parsed, dict):
        raise ConfigError("not a JSON object", field="tokenizer", fix=f"use a complete {name}")
    return cast(dict[str, Any], parsed)


def _build(definition: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the Rust side raises nothing more precise
        raise ConfigError(
            f"cannot be read: {error}",
            field="tokenizer",
            fix=f"use a {TOKENIZER_FILE} that tokenizers {tokenizers.__version__} reads",
        ) from error
