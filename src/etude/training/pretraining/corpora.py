"""Tokenised corpora: each source is tokenised once and memory-mapped by every run that reads it.

    CACHE/NAME-<digest of files, column, tokenizer, end token>/
        tokens.bin    all documents end to end, uint16 or int32
        ends.npy      [documents] int64: where each ends
        hashes.npy    [documents] uint32: of each one's tokens
        corpus.json   metadata, and the BLAKE3 of the first two

A corpus is written under another name and renamed when complete, so a killed tokenisation leaves no readable
corpus, and the source's next one removes its files. Changed files have another digest, so another corpus.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.kit.durable import DRAFTS, whole_directory, write_json
from etude.kit.leftovers import sweep
from etude.tokens.tokenizer import Tokenizer
from etude.training.pretraining.reading import Raw, SourceFiles

_FORMAT = 1
_BATCH_DOCUMENTS = 256
_HASHES = 1 << 32
_ESCAPED = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The documents of one source, as tokens."""

    name: str
    tokens: NDArray[np.integer[Any]]
    """[all tokens], memory-mapped."""
    ends: NDArray[np.int64]
    """[documents]"""
    hashes: NDArray[np.uint32]
    """[documents] of each one's tokens."""
    digest: str
    """Of the tokens and where documents end."""
    skipped: dict[str, int]
    """Numbers of skipped documents, by reason."""
    is_text: bool
    """Whether it was tokenised here, so that it may be cut at characters."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[documents] tokens of each."""
        return np.diff(self.ends, prepend=0)

    def document(self, index: int) -> NDArray[np.int32]:
        """Token ids of one document."""
        begin = int(self.ends[index - 1]) if index else 0
        return self.tokens[begin : int(self.ends[index])].astype(np.int32)

    def heldout(self, share: float) -> NDArray[np.bool_]:
        """[documents] which are held out: chosen by their content, so that copies are on the same side.

        At least one if `share` is above 0 and two documents differ.
        """
        if share <= 0:
            return np.zeros(len(self), dtype=np.bool_)
        chosen = self.hashes < share * _HASHES
        if not chosen.any() and len(np.unique(self.hashes)) > 1:
            chosen = self.hashes == self.hashes.min()
        return chosen if not chosen.all() else np.zeros(len(self), dtype=np.bool_)


def open_corpus(files: SourceFiles, tokenizer: Tokenizer, end_token: int | None, cache: Path) -> Corpus:
    """The corpus of these files: mapped if it was tokenised before, otherwise tokenised now.

    `end_token` is appended to every text. Raises ConfigError for a source without documents, token ids beyond
    the vocabulary, or a damaged cache.
    """
    key = (_FORMAT, files.identity, files.format, files.column, tokenizer.digest, end_token)
    directory = cache / f"{files.name}-{blake3(repr(key).encode()).hexdigest(length=12)}"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache, DRAFTS)
        with whole_directory(directory, keep=directory.exists) as draft:  # another process may be quicker
            write_json(draft / "corpus.json", _write_arrays(files, tokenizer, end_token, draft))
    return _open(files.name, directory)


def _open(name: str, directory: Path) -> Corpus:
    try:
        about = json.loads((directory / "corpus.json").read_text(encoding="utf-8"))
        tokens = np.memmap(directory / "tokens.bin", dtype=about["dtype"], mode="r")
        ends, hashes = np.load(directory / "ends.npy"), np.load(directory / "hashes.npy")
        counts = (about["num_tokens"], about["num_documents"], about["num_documents"])
        if (len(tokens), len(ends), len(hashes)) != counts or ends[-1] != len(tokens):
            raise ValueError("its files do not match")
    except (OSError, EOFError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"the tokenised corpus is damaged: {error}",
            field=f"source {name}",
            received=str(directory),
            fix="remove the directory: it will be created again",
        ) from error
    return Corpus(name, tokens, ends, hashes, about["digest"], about["skipped"], about["is_text"])


def _write_arrays(
    files: SourceFiles, tokenizer: Tokenizer, end_token: int | None, directory: Path
) -> dict[str, Any]:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "int32"
    skipped, hasher = Counter[str](), blake3()
    lengths: list[int] = []
    hashes: list[int] = []
    texts = 0
    with (directory / "tokens.bin").open("wb") as file:
        for raw, tokens in _tokenise(files.read(skipped), tokenizer, end_token):
            texts += isinstance(raw, str)
            if not isinstance(raw, str) and not (tokens.min() >= 0 and tokens.max() < tokenizer.vocab_size):
                raise ConfigError(
                    f"document {len(lengths)} has token ids beyond the vocabulary of {tokenizer.vocab_size}",
                    field=f"source {files.name}",
                    received=int(tokens.max()) if tokens.min() >= 0 else int(tokens.min()),
                    fix="tokenise it with the model's tokenizer, or give texts",
                )
            data = tokens.astype(dtype).tobytes()
            file.write(data)
            hasher.update(data)
            lengths.append(len(tokens))
            hashes.append(xxhash.xxh32_intdigest(data))
    if not lengths:
        raise ConfigError(
            "has no documents",
            field=f"source {files.name}",
            received=dict(skipped) or "empty files",
            fix="name another path or column",
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    np.save(directory / "ends.npy", ends)
    np.save(directory / "hashes.npy", np.array(hashes, dtype=np.uint32))
    hasher.update(ends.tobytes())
    return {
        "name": files.name,
        "format": files.format,
        "tokenizer": tokenizer.digest,
        "dtype": dtype,
        "num_documents": len(lengths),
        "num_tokens": int(ends[-1]),
        "is_text": texts == len(lengths),
        "skipped": dict(skipped),
        "digest": hasher.hexdigest(),
    }


def _tokenise(
    raws: Iterable[Raw], tokenizer: Tokenizer, end_token: int | None
) -> Iterator[tuple[Raw, NDArray[np.int64]]]:
    """Yields each document with its tokens; texts are encoded in batches, on all cores."""
    pending: list[Raw] = []

    def flush() -> Iterator[tuple[Raw, NDArray[np.int64]]]:
        # A lone surrogate, which JSON can express and UTF-8 cannot, would fail the whole batch.
        texts = [_ESCAPED.sub("�", raw) for raw in pending if isinstance(raw, str)]
        encoded = iter(tokenizer.encode_batch(texts))
        ending = [] if end_token is None else [end_token]
        for raw in pending:
            tokens = np.append(next(encoded), ending) if isinstance(raw, str) else raw
            yield raw, tokens.astype(np.int64)
        pending.clear()

    for raw in raws:
        pending.append(raw)
        if len(pending) == _BATCH_DOCUMENTS:
            yield from flush()
    yield from flush()
