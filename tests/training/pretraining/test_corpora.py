"""Corpora: every format, tokenised once, held out by content, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from etude.config import SourceConfig
from etude.errors import ConfigError, ResourceError
from etude.kit.leftovers import ScratchDirectory
from etude.tokens.training import END_TOKEN
from etude.training.pretraining.corpora import Corpus, open_corpus
from etude.training.pretraining.infilling import Infilling
from etude.training.pretraining.reading import find_files
from etude.training.pretraining.sources import CorpusSource, InfillingShares
from tests.training.pretraining.builders import TEXTS, make_corpus, tiny_tokenizer, write_jsonl


def _open(path: Path, **changes: object) -> Corpus:
    config = SourceConfig.model_validate({"path": str(path), **changes})
    tokenizer = tiny_tokenizer()
    cache = path.parent / "cache"
    return open_corpus(find_files("code", config), tokenizer, tokenizer.control_id(END_TOKEN), cache)


def _texts(corpus: Corpus) -> list[str]:
    end = tiny_tokenizer().control_id(END_TOKEN)
    documents = [corpus.document(i) for i in range(len(corpus))]
    assert all(tokens[-1] == end for tokens in documents)
    return [tiny_tokenizer().decode(tokens[:-1]) for tokens in documents]


@pytest.mark.parametrize("kind", ["jsonl", "zst", "parquet", "files", "directory"])
def test_every_format_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    data = tmp_path / "data"
    data.mkdir()
    if kind == "zst":
        (data / "a.jsonl.zst").write_bytes(zstandard.compress(rows))
    elif kind == "parquet":
        pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": TEXTS}), data / "a.parquet")
    elif kind == "files":
        for number, text in enumerate(TEXTS):
            (data / f"{number}.py").write_text(text, encoding="utf-8")
        (data / "notes.md").write_text("left out", encoding="utf-8")
    else:
        (data / "a.jsonl").write_bytes(rows)
    path = data / "a.jsonl" if kind == "jsonl" else data
    assert _texts(_open(path)) == TEXTS


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    corpus = _open(write_jsonl(tmp_path / "a.jsonl", [[5, 6, 7], [8]], "tokens"), column="tokens")
    assert [corpus.document(i).tolist() for i in range(2)] == [[5, 6, 7], [8]]
    assert not corpus.is_text


def test_a_corpus_is_tokenised_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", list(TEXTS))
    first = _open(path)
    (made,) = (tmp_path / "cache").iterdir()
    stamp = (made / "tokens.bin").stat().st_mtime_ns
    assert _open(path).digest == first.digest
    assert (made / "tokens.bin").stat().st_mtime_ns == stamp
    write_jsonl(path, [*TEXTS, "more"])
    assert len(_open(path)) == len(TEXTS) + 1
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_what_is_not_utf8_or_empty_is_skipped_and_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "good.py").write_text(TEXTS[0], encoding="utf-8")
    (data / "bad.py").write_bytes(b"x = '\xff\xfe'")
    (data / "empty.py").write_bytes(b"")
    corpus = _open(data)
    assert len(corpus) == 1
    assert corpus.skipped == {"not UTF-8": 1, "empty": 1}


def test_a_lone_surrogate_in_json_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n', encoding="utf-8")
    assert _texts(_open(path)) == ["a�b"]


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "no documents"),
        (["", ""], {}, "no documents"),
        (["x"], {"column": "body"}, "no 'body'"),
        ([{"a": 1}], {}, "neither texts nor lists"),
        ([["a", "b"]], {}, "neither texts nor lists"),
        ([[1, 100_000]], {}, "beyond the vocabulary"),
        ([[[1], [2, 3]]], {}, "neither texts nor lists"),
        ([[1, -2]], {}, "beyond the vocabulary"),
    ],
)
def test_bad_corpora_are_refused_and_leave_nothing(
    tmp_path: Path, rows: list[object], changes: dict[str, object], message: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=message):
        _open(path, **changes)
    cache = tmp_path / "cache"
    assert not cache.exists() or not list(cache.iterdir())


def test_damaged_files_name_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        _open(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="is not Parquet"):
        _open(tmp_path / "a.parquet")
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="no column 'text'"):
        _open(tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="no such file"):
        _open(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no documents"):
        _open(tmp_path, format="files", pattern="*.nothing")


def test_compressed_files_are_read_frame_by_frame_to_their_end_or_refused(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    texts = [f"number {number} {np.random.default_rng(number).bytes(3000).hex()}" for number in range(40)]
    rows = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    frames = compress(b"".join(rows[:25])) + compress(b"".join(rows[25:]))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frames)
    files = find_files("code", SourceConfig(path=str(path)))
    assert list(files.read(Counter())) == texts
    path.write_bytes(frames[:-1000])
    with pytest.raises(ConfigError, match="is truncated"):
        list(files.read(Counter()))
    path.write_bytes(b"no frame of Zstandard's")
    with pytest.raises(ConfigError, match="damaged"):
        list(files.read(Counter()))


@pytest.mark.parametrize("pattern", ["", "/etc/*.py"])
def test_patterns_that_cannot_be_looked_for_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern is not valid"):
        find_files("code", SourceConfig(path=str(tmp_path), format="files", pattern=pattern))


def test_lance_says_what_to_install(tmp_path: Path) -> None:
    if importlib.util.find_spec("lance") is not None:
        pytest.skip("pylance is installed")
    (tmp_path / "a.lance").mkdir()
    with pytest.raises(ResourceError, match="pylance"):
        _open(tmp_path / "a.lance")


@pytest.mark.foreign
def test_lance_data_sets_are_read_as_other_formats_are(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    path = tmp_path / "a.lance"
    lance.write_dataset(pa.table({"id": [1, 2, 3, 4], "text": TEXTS}), path)
    assert _texts(_open(path)) == TEXTS
    lance.write_dataset(pa.table({"id": [5], "text": ["more"]}), path, mode="append")
    assert _texts(_open(path)) == [*TEXTS, "more"], "the newest version, tokenised anew"
    ids = tmp_path / "ids.lance"
    lance.write_dataset(pa.table({"tokens": [[5, 6, 7], [8]]}), ids)
    corpus = _open(ids, column="tokens")
    assert [corpus.document(i).tolist() for i in range(2)] == [[5, 6, 7], [8]]


@pytest.mark.foreign
def test_lance_data_sets_that_cannot_be_read_name_themselves(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    (tmp_path / "empty.lance").mkdir()
    with pytest.raises(ConfigError, match="is not a Lance data set"):
        _open(tmp_path / "empty.lance")
    path = tmp_path / "a.lance"
    lance.write_dataset(pa.table({"text": TEXTS}), path)
    with pytest.raises(ConfigError, match="no column 'body'"):
        _open(path, column="body")
    for file in (path / "data").iterdir():
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match="is not a Lance data set"):
        _open(path)
    assert not list((tmp_path / "cache").iterdir())


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", list(TEXTS))
    _open(path)
    (made,) = (tmp_path / "cache").iterdir()
    (made / "tokens.bin").write_bytes((made / "tokens.bin").read_bytes()[:-8])
    with pytest.raises(ConfigError, match="damaged"):
        _open(path)


def test_an_array_of_the_cache_that_is_empty_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", list(TEXTS))
    _open(path)
    (made,) = (tmp_path / "cache").iterdir()
    (made / "ends.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match="damaged"):
        _open(path)


def test_what_a_killed_tokenisation_left_is_in_nobodys_way(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", list(TEXTS))
    first = _open(path)
    (made,) = (tmp_path / "cache").iterdir()
    made.rename(made.with_name(f".{made.name}.{os.getpid()}.partial"))  # of a process that had our number
    assert _open(path).digest == first.digest


KILLED = """
import os, signal, sys
from pathlib import Path
from etude.training.pretraining import corpora
from tests.training.pretraining.test_corpora import _open
corpora.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
_open(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_what_a_killed_tokenisation_left_goes_with_the_next_and_that_of_a_live_one_stays(
    tmp_path: Path,
) -> None:
    path, cache = write_jsonl(tmp_path / "a.jsonl", list(TEXTS)), tmp_path / "cache"
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    assert killed.returncode == -signal.SIGKILL and len(list(cache.iterdir())) == 1
    with ScratchDirectory(cache, ".code-") as alive:
        assert len(_open(path)) == len(TEXTS)
        assert alive.exists() and len(list(cache.iterdir())) == 2, "the corpus, and what is being written"


def test_copies_are_on_the_same_side_of_what_is_held_out(tmp_path: Path) -> None:
    texts: list[object] = [f"x = {number % 40}\n" for number in range(80)]
    corpus = make_corpus(tmp_path, texts)
    held = corpus.heldout(0.3)
    assert 0 < held.sum() < 80
    assert np.array_equal(held[:40], held[40:])
    assert corpus.heldout(1e-9).sum() == 2, "at least one document, with its copy"
    assert not corpus.heldout(0.0).any()
    assert not make_corpus(tmp_path, ["only one"], "single").heldout(0.5).any()


def test_pieces_of_long_documents_are_turned_inside_out_too(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, [TEXTS[0] * 40])
    infilling = Infilling.of(tiny_tokenizer())
    source = CorpusSource(
        corpus, SourceConfig(path="x"), corpus.heldout(0.0), shares=InfillingShares(infilling, 1.0, 0.5)
    )
    pieces = source.pieces(64)
    assert len(pieces) > 10
    read = [source.read(piece, 64, np.random.default_rng(number)) for number, piece in enumerate(pieces)]
    turned = sum(int(document.tokens[0]) == infilling.prefix for document in read)
    assert turned >= len(pieces) - 1, "all but what may be left of the end"
    assert all(len(document.tokens) <= 64 for document in read)
