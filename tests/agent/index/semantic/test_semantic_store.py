"""The store on disk: what is in it, and what happens when somebody dies or it is damaged."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.agent.index.semantic.records import make_record, read_record, write_record
from etude.agent.index.semantic.state import CutFile, FileEntry, TreeState, assemble, load_state, save_state
from etude.agent.index.semantic.store import RecordsGoneError, SemanticStore
from etude.agent.index.semantic.tree import FileStat
from etude.agent.index.semantic.vectors import VectorFile, append_rows, pack_rows
from etude.errors import StoreError

SOURCE = b"class A:\n    x = 1\n\n    def read_all(self):\n        return self.x\n"
STAT = FileStat(len(SOURCE), 1, 2, 3)


def names(count: int, start: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(start, start + count)]


def table(hashes: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16)


def unit_vectors(count: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, 24)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def a_state(path: str = "a.py") -> tuple[TreeState, dict[bytes, object]]:
    record = make_record(path, SOURCE)
    key = b"k" * 16
    return assemble(None, [FileEntry(path, b"d" * 32, key, STAT, CutFile.of(path, record))], scanned=True), {
        key: record
    }


def test_a_record_comes_back_as_it_was() -> None:
    record = make_record("a.py", SOURCE)
    again = read_record(write_record(record))
    assert again.chunks == record.chunks and again.hashes == record.hashes
    assert write_record(again) == write_record(record)


@given(st.integers(0, 10_000), st.integers(1, 255))
@example(20, 4)  # the flag that says that a checksum follows
@example(20, 192)  # the width of the length
@example(20, 16)  # a flag without a meaning
def test_a_damaged_record_is_refused_or_reads_as_it_was(place: int, change: int) -> None:
    whole = write_record(make_record("a.py", SOURCE))
    data = bytearray(whole)
    data[place % len(data)] ^= change
    try:
        again = read_record(bytes(data))
    except StoreError:
        return
    assert place % len(data) == 20, "zstd's descriptor has a bit that nobody reads"
    assert write_record(again) == whole


@given(st.integers(0, 200))
def test_a_torn_record_is_refused(kept: int) -> None:
    data = write_record(make_record("a.py", SOURCE))
    with pytest.raises(StoreError):
        read_record(data[: min(kept, len(data) - 1)])


def test_products_are_near_to_exact_ones(tmp_path: Path) -> None:
    vectors = unit_vectors(3000)
    append_rows(tmp_path / "v", 0, pack_rows(vectors))
    file = VectorFile(tmp_path / "v", 24, 3000)
    rows = np.concatenate([np.arange(1500), np.arange(1500, 3000, 3)])
    np.testing.assert_allclose(file.products(vectors[7], rows), vectors[rows] @ vectors[7], atol=0.01)
    np.testing.assert_allclose(file.rows(rows), vectors[rows], atol=0.01)


def test_vectors_are_kept_once_and_found_by_hash(tmp_path: Path) -> None:
    store = SemanticStore(tmp_path)
    vectors = unit_vectors(6)
    store.add_vectors("m", names(4), vectors[:4])
    store.add_vectors("m", names(4, start=2), vectors[2:])
    assert store.places("m", table(names(7)))[0].tolist() == [0, 1, 2, 3, 4, 5, -1]
    assert store.vector_file("m", 24)[0].num_rows == 6
    found = store.vectors("m", 24, table(names(7)))
    assert set(found) == set(names(6))
    np.testing.assert_allclose(found[names(6)[5]], vectors[5], atol=0.01)
    assert store.places("other", table(names(2)))[0].tolist() == [-1, -1]


def test_rows_that_were_never_published_are_written_over(tmp_path: Path) -> None:
    store = SemanticStore(tmp_path)
    store.add_vectors("m", names(2), unit_vectors(2))
    (path,) = tmp_path.glob("vectors-*.i8")
    with path.open("ab") as file:
        file.write(b"torn" * 9)
    store.add_vectors("m", names(1, start=2), unit_vectors(3)[2:])
    np.testing.assert_allclose(
        store.vectors("m", 24, table(names(3)))[names(3)[2]], unit_vectors(3)[2], atol=0.01
    )


def test_a_file_of_vectors_that_lost_rows_is_refused(tmp_path: Path) -> None:
    store = SemanticStore(tmp_path)
    store.add_vectors("m", names(4), unit_vectors(4))
    (path,) = tmp_path.glob("vectors-*.i8")
    os.truncate(path, 10)
    with pytest.raises(StoreError, match="shorter"):
        store.add_vectors("m", names(1, start=9), unit_vectors(1))
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        store.vector_file("m", 24)


def test_a_state_comes_back_and_a_changed_byte_is_refused(tmp_path: Path) -> None:
    state, _ = a_state("odd\udcffname.py")
    save_state(state, tmp_path / "s")
    again = load_state(tmp_path / "s")
    assert again.paths == state.paths and again.scanned
    np.testing.assert_array_equal(again.lexicon.docs, state.lexicon.docs)
    for path in (tmp_path / "s").iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(StoreError):
            load_state(tmp_path / "s")
        path.write_bytes(whole)


def test_a_state_whose_writing_failed_leaves_nothing(tmp_path: Path) -> None:
    state, _ = a_state()
    (tmp_path / "s" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        save_state(state, tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_state_without_its_records_is_not_published(tmp_path: Path) -> None:
    store = SemanticStore(tmp_path)
    state, records = a_state()
    with pytest.raises(RecordsGoneError):
        store.publish("t", "", state)
    store.add_records(records)  # type: ignore[arg-type]
    store.publish("t", "", state)
    loaded = store.load("t", "")
    assert loaded is not None and loaded.paths == ("a.py",)
    assert store.load("other", "") is None


def test_leftovers_of_a_writer_that_died_go_with_the_next_state(tmp_path: Path) -> None:
    store = SemanticStore(tmp_path)
    state, records = a_state()
    store.add_records(records)  # type: ignore[arg-type]
    (tmp_path / "states" / "abc.1.partial").mkdir()
    for _ in range(4):
        store.publish("t", "", state)
    assert len(list((tmp_path / "states").iterdir())) == 2, "the present one and the one before"


def test_pruning_keeps_what_states_name(tmp_path: Path) -> None:
    store = SemanticStore(tmp_path)
    state, records = a_state()
    hashes = [row.tobytes() for row in state.hashes]
    store.add_records({**records, b"o" * 16: make_record("b.py", b"y = 1\n")})  # type: ignore[dict-item]
    store.add_vectors("m", [*names(5), *hashes], unit_vectors(5 + len(hashes)))
    store.publish("t", "m", state)
    before = store.vectors("m", 24, state.hashes)
    held, _ = store.vector_file("m", 24)
    store.prune()
    assert set(store.records([b"k" * 16, b"o" * 16])) == {b"k" * 16}
    assert store.places("m", table(names(5)))[0].tolist() == [-1] * 5
    after = store.vectors("m", 24, state.hashes)
    assert all(np.array_equal(after[name], before[name]) for name in hashes)
    assert held.num_rows == 5 + len(hashes) and held.rows(np.array([0])).any(), "mapped files stay readable"
    assert len(list(tmp_path.glob("vectors-*.i8"))) == 1
    loaded = store.load("t", "m")
    assert loaded is not None and loaded.rows.tolist() == list(range(len(hashes)))


def test_a_store_of_another_version_or_no_store_is_refused(tmp_path: Path) -> None:
    SemanticStore(tmp_path / "a").close()
    with sqlite3.connect(tmp_path / "a" / "store.sqlite") as database:
        database.execute("UPDATE facts SET value = 99")
    database.close()
    with pytest.raises(StoreError, match="another version"):
        SemanticStore(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "store.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError):
        SemanticStore(tmp_path / "b")


WRITER = """
import sys
import numpy as np
from pathlib import Path
from etude.agent.index.semantic.store import SemanticStore
store = SemanticStore(Path(sys.argv[1]))
start = int(sys.argv[2])
for number in range(start, start + int(sys.argv[3])):
    vector = np.full((1, 24), 0.1, np.float32)
    vector[0, number % 24] = 1
    store.add_vectors("m", [number.to_bytes(16, "little")], vector)
    print(number, flush=True)
"""


def check_rows(folder: Path, numbers: range) -> int:
    """Every vector that is named is the one that was written; how many there are."""
    store = SemanticStore(folder)
    found = store.vectors("m", 24, table([number.to_bytes(16, "little") for number in numbers]))
    for name, vector in found.items():
        assert int(np.argmax(vector)) == int.from_bytes(name, "little") % 24
    store.close()
    return len(found)


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_loses_nothing_that_it_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "0", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
    found = check_rows(tmp_path, range(1000))
    assert found >= len(told)
    with_next = subprocess.run([*command[:-2], "500", "3"], capture_output=True, timeout=60, check=True)
    assert len(with_next.stdout.split()) == 3
    assert check_rows(tmp_path, range(500, 503)) == 3


@pytest.mark.slow
def test_two_processes_write_into_one_store(tmp_path: Path) -> None:
    SemanticStore(tmp_path).close()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), start, "40"], stdout=subprocess.DEVNULL
        )
        for start in ("0", "20")
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert check_rows(tmp_path, range(60)) == 60
    assert SemanticStore(tmp_path).vector_file("m", 24)[0].num_rows == 60, "what both wrote is there once"
