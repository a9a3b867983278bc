"""Small corpora and sources for tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np

from etude.config import SourceConfig
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import END_TOKEN, train_tokenizer
from etude.training.pretraining.corpora import Corpus, open_corpus
from etude.training.pretraining.infilling import OWN_SENTINELS
from etude.training.pretraining.reading import find_files
from etude.training.pretraining.sources import CorpusSource

TEXTS = [
    f"def add_{name}(left, right):\n    total = left + {number}\n    return total + right\n" * repeats
    for name, number, repeats in (("one", 1, 1), ("two", 2, 2), ("três", 3, 5), ("four", 4, 1))
]


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """300 tokens or so, with the marks for filling in."""
    return train_tokenizer(TEXTS, 320, [END_TOKEN, *OWN_SENTINELS])


def write_jsonl(path: Path, rows: list[object], column: str = "text") -> Path:
    """One row per document."""
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows), encoding="utf-8")
    return path


def make_corpus(directory: Path, texts: list[object] | None = None, name: str = "code") -> Corpus:
    """Tokenised from a JSONL file, with an end token behind each text."""
    path = write_jsonl(directory / f"{name}.jsonl", list(TEXTS) if texts is None else texts)
    settings = SourceConfig(path=str(path))
    tokenizer = tiny_tokenizer()
    files = find_files(name, settings)
    return open_corpus(files, tokenizer, tokenizer.control_id(END_TOKEN), directory / "cache")


def token_source(directory: Path, lengths: list[int], name: str = "code", **config: object) -> CorpusSource:
    """Documents of these many tokens, nothing held out unless asked for."""
    random = np.random.default_rng(len(lengths))
    texts: list[object] = [random.integers(0, 64, length).tolist() for length in lengths]
    corpus = make_corpus(directory, texts, name)
    settings = SourceConfig.model_validate({"path": "x", "heldout_share": 0.0, **config})
    return CorpusSource(corpus, settings, corpus.heldout(settings.heldout_share))
