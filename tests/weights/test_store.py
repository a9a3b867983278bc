"""Versions appear atomically, from one writer at a time, and are kept as long as they are in use."""

from __future__ import annotations

import errno
import json
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import StoreError, WeightUpdateError
from etude.weights.commits import Commit, commit_name
from etude.weights.folders import (
    DirectoryFolder,
    ExistsError,
    FsspecFolder,
    MissingError,
    UnavailableError,
    open_folder,
)
from etude.weights.lease import WriterLease
from etude.weights.store import WeightStore
from etude.weights.writer import StoreWriter, upload
from tests.sandbox.test_lifecycle import eventually
from tests.weights.stores import (
    FAST,
    BeatingFolder,
    FailingFolder,
    digest_at,
    failing_store,
    tensors_at,
    version_at,
)


def _write(writer: StoreWriter, step: int, base: int | None = None) -> Commit:
    """What a publisher does with a version, step by step."""
    named = replace(version_at(step), digest=digest_at(step))
    based = None if base is None else replace(version_at(base), digest=digest_at(base))
    publication = writer.begin()
    try:
        held = None if base is None else tensors_at(base)
        files = upload(writer._store.folder, publication, FAST, tensors_at(step), held)
        commit = writer.commit(publication, named, based, [files])
    except StoreError:
        writer.discard(publication)
        raise
    writer.clean_up(commit)
    return commit


def _write_chain(writer: StoreWriter, steps: int) -> None:
    _write(writer, 0)
    for step in range(1, steps):
        _write(writer, step, step - 1)


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_folders_hold_what_was_written(kind: str, tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path) if kind == "directory" else f"memory://{tmp_path.name}")
    assert folder.list("x") == []
    folder.write("x/b", b"1")
    folder.write("x/b", b"2")
    folder.create("x/y/a", b"3")
    with pytest.raises(ExistsError):
        folder.create("x/y/a", b"4")
    assert folder.list("x") == ["x/b", "x/y/a"]
    assert folder.read("x/y/a") == b"3"
    folder.delete("x/b")
    folder.delete("x/b")
    with pytest.raises(MissingError):
        folder.read("x/b")


def test_of_many_who_create_one_succeeds(tmp_path: Path) -> None:
    folder, winners = DirectoryFolder(tmp_path), []

    def create(index: int) -> None:
        try:
            folder.create("name", str(index).encode())
        except ExistsError:
            return
        winners.append(index)

    threads = [threading.Thread(target=create, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert folder.read("name") == str(winners[0]).encode()
    assert folder.list("") == ["name"]


def test_a_scheme_that_nobody_knows_is_named() -> None:
    with pytest.raises(StoreError) as caught:
        open_folder("nonsense://x")
    assert caught.value.field == "weights.url"


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        StoreWriter(WeightStore.open(str(tmp_path / "file")), FAST)


def test_every_fourth_version_comes_with_a_snapshot(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    with closing(StoreWriter(store, FAST)) as writer:
        _write_chain(writer, 6)
    commits = store.commits()
    assert sorted(commits) == [1, 2, 3, 4, 5, 6]
    assert [sequence for sequence, commit in commits.items() if commit.full] == [1, 5]
    assert [sequence for sequence, commit in commits.items() if commit.delta] == [2, 3, 4, 5, 6]
    assert len(commits[1].full) > 1, "in shards"


def test_old_chains_are_collected_behind_the_second_last_snapshot(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    with closing(StoreWriter(store, FAST)) as writer:
        _write_chain(writer, 11)
    assert min(store.commits()) == 5
    files = set(store.folder.list("files"))
    assert files == {file.name for commit in store.commits().values() for file in commit.files}


def test_what_the_slowest_reader_pins_stays_until_its_pin_is_old(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    with closing(StoreWriter(store, FAST)) as writer:
        _write_chain(writer, 8)
        store.pin("reader", 3, keep_s=600)
        store.pin("faster", 7, keep_s=600)
        for step in range(8, 12):
            _write(writer, step, step - 1)
        assert min(store.commits()) == 3
        store.pin("reader", 3, keep_s=0.05)
        writer.collect()
        time.sleep(0.06)
        writer.collect()
        assert min(store.commits()) == 5


@pytest.mark.parametrize("refused", ["full-0000-00000", "full-0000-00001", "commits"])
def test_a_full_disk_leaves_no_part_of_a_version(refused: str, tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    with closing(StoreWriter(store, FAST)) as writer:
        folder.refuse_writes = {refused}
        with pytest.raises(StoreError):
            _write(writer, 0)
        assert store.commits() == {} and store.folder.list("files") == []
        folder.refuse_writes = set()
        _write(writer, 0)
    assert sorted(store.commits()) == [1]


class _RefusingFiles:
    """A file system of fsspec's that refuses to write."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (PermissionError("Access Denied"), "grant the permission"),
        (OSError(errno.EROFS, "Read-only file system"), "grant the permission"),
        (ConnectionError("refused"), "check that it answers"),
    ],
)
def test_what_a_file_system_says_is_said_with_its_cure(error: OSError, said: str) -> None:
    folder = FsspecFolder("other://place", _RefusingFiles(error), "place")
    for write in (folder.write, folder.create):
        with pytest.raises(StoreError) as caught:
            write("x", b"data")
        assert caught.value.field == "weights.url"
        assert said in (caught.value.fix or "")


def test_files_of_a_killed_writer_are_removed_by_the_next(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    with closing(StoreWriter(store, FAST)) as writer:
        _write_chain(writer, 2)
    store.folder.write("files/000000000003-dead/full-00000.etude", b"half")
    (tmp_path / "files/000000000003-dead/.full-00001.etude.7.7.tmp").write_bytes(b"in the middle of a file")
    with closing(StoreWriter(store, FAST)) as writer:
        assert not (tmp_path / "files/000000000003-dead").exists()
        assert len(store.folder.list("files")) == len(
            [f for f in (tmp_path / "files").rglob("*") if f.is_file()]
        )
        assert writer.next_sequence == 3


class _EmptiedFolder(DirectoryFolder):
    """A folder in which somebody removes each directory as soon as it is made, once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._removed: set[Path] = set()

    def _make_parent(self, name: str) -> Path:
        path = super()._make_parent(name)
        if path.parent not in self._removed:
            self._removed.add(path.parent)
            path.parent.rmdir()
        return path


def test_a_directory_that_another_found_empty_is_made_again(tmp_path: Path) -> None:
    folder = _EmptiedFolder(tmp_path)
    folder.write("pins/a.json", b"1")
    folder.create("commits/a.json", b"2")
    assert (folder.read("pins/a.json"), folder.read("commits/a.json")) == (b"1", b"2")


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    seen = WeightStore(BeatingFolder(DirectoryFolder(tmp_path)))
    with closing(StoreWriter(store, FAST)), pytest.raises(StoreError, match="another writer") as caught:
        StoreWriter(seen, FAST)
    assert caught.value.fix
    StoreWriter(store, FAST).close()


def test_a_dead_writers_place_is_taken_and_it_is_shut_out(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    stuck, folder = failing_store(tmp_path)
    first = StoreWriter(stuck, FAST)
    folder.refuse_writes = {"writers"}
    assert eventually(lambda: folder.num_refused > 0), "no beat is on its way any more"
    with closing(StoreWriter(store, FAST)) as second:
        _write(second, 0)
        with pytest.raises(StoreError):
            _write(first, 1)
    assert [commit.version.step for commit in store.commits().values()] == [0]
    folder.refuse_writes = set()
    first.close()


def test_a_lease_lives_as_long_as_it_beats(tmp_path: Path) -> None:
    folder = DirectoryFolder(tmp_path)
    with closing(WriterLease(folder, 0.2)) as lease:
        assert eventually(lambda: json.loads(folder.read("writers/00000001.json"))["beats"] > 8)
        lease.check()
        with pytest.raises(StoreError, match="another writer publishes"):
            WriterLease(BeatingFolder(folder), 0.2)


@pytest.mark.parametrize("left", [b"", b"{", b"[]", b'{"owner": "somebody"}'])
def test_a_lease_whose_writer_died_while_it_wrote_is_free_once_it_does_not_beat(
    tmp_path: Path, left: bytes
) -> None:
    folder = DirectoryFolder(tmp_path)
    folder.write("writers/00000007.json", left)
    began = time.monotonic()
    with closing(WriterLease(folder, 0.1)) as lease:
        assert lease.epoch == 8
        assert time.monotonic() - began >= 0.1, "it may have been written just then"


def test_a_writer_that_cannot_beat_says_so_until_it_can(tmp_path: Path) -> None:
    folder = FailingFolder(DirectoryFolder(tmp_path))
    with closing(WriterLease(folder, 0.1)) as lease:
        folder.refuse_writes = {"writers"}
        assert eventually(lambda: "the weight store failed" in _refusal(lease))
        folder.refuse_writes = set()
        assert eventually(lambda: not _refusal(lease)), "nobody has taken the store over"
        folder.refuse_writes = {"writers"}
        assert eventually(lambda: bool(_refusal(lease)))
        WriterLease(DirectoryFolder(tmp_path), 0.1).close()
        folder.refuse_writes = set()
        assert eventually(lambda: "taken this weight store over" in _refusal(lease))


def _refusal(lease: WriterLease) -> str:
    try:
        lease.check()
    except StoreError as error:
        return str(error)
    return ""


class _ForgetfulFolder(FailingFolder):
    """A folder that does what it is asked and, asked to create this, does not answer."""

    silent_on = ""

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)
        if self.silent_on and self.silent_on in name:
            raise UnavailableError("answers too late", received=name)


def test_a_commit_whose_answer_stays_out_stops_no_later_version(tmp_path: Path) -> None:
    folder = _ForgetfulFolder(DirectoryFolder(tmp_path))
    with closing(StoreWriter(WeightStore(folder), FAST)) as writer:
        folder.silent_on = "commits"
        with pytest.raises(UnavailableError):
            _write(writer, 0)
        folder.silent_on = ""
        _write_chain(writer, 2)
    assert sorted(WeightStore(folder).commits()) == [1, 2, 3]


def test_a_writer_that_cannot_begin_lets_the_next_one_in(tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    store.folder.write("commits/000000000001.json", b"{}")
    folder.lose = {"commits"}
    with pytest.raises(StoreError, match="link is down"):
        StoreWriter(store, FAST)
    folder.lose = set()
    StoreWriter(WeightStore(BeatingFolder(DirectoryFolder(tmp_path))), FAST).close()


def test_a_damaged_commit_is_no_version(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    with closing(StoreWriter(store, FAST)) as writer:
        _write_chain(writer, 3)
        data = bytearray(store.folder.read(commit_name(2)))
        data[40] ^= 1
        store.folder.write(commit_name(2), bytes(data))
        fresh = WeightStore.open(str(tmp_path))
        assert sorted(fresh.commits()) == [1, 3]
        with pytest.raises(WeightUpdateError, match="damaged"):
            fresh.wait_for(2, 0)
        assert fresh.newest_sequence() == 3
    with closing(StoreWriter(fresh, FAST)) as writer:
        assert writer.next_sequence == 4


def test_a_version_that_does_not_come_is_not_waited_for_forever(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="did not appear"):
        WeightStore.open(str(tmp_path)).wait_for(1, 0.1)
