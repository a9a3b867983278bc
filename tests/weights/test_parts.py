"""Several processes publish parts of one model: readers see it complete, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.errors import RankError, StoreError, WeightUpdateError
from etude.records import TensorEntry
from etude.weights import StoreWeights, Subscriber, WeightStore, check_tensors
from etude.weights.folders import DirectoryFolder
from etude.weights.manifest import describe_tensor
from etude.weights.parts import Part, join_entries, parse_part
from tests.weights.stores import FAST, FailingFolder, assert_is, tensors_at, version_at


class _Room:
    """Where threads that play the peers of one publisher meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.told: list[Any] = [None] * size
        self.exchanges = 0
        self.dies: tuple[int, int] | None = None
        """Which rank is gone, from which exchange on."""


class _Peer:
    """Implements Peers within one process."""

    def __init__(self, room: _Room, rank: int) -> None:
        self.rank = rank
        self._room = room
        self._calls = 0

    def exchange(self, value: Any) -> list[Any]:
        self._calls += 1
        room = self._room
        if room.dies is not None and self._calls >= room.dies[1]:
            raise RankError("is gone", field=f"rank {room.dies[0]}")
        room.told[self.rank] = value
        room.barrier.wait()
        told = list(room.told)
        room.barrier.wait()
        return told


class _Ranks:
    """Publishers that publish together, each in a thread of its own."""

    def __init__(
        self, path: Path, size: int, dtype: torch.dtype | None = None, scratch: Sequence[Path] = ()
    ) -> None:
        self.room = _Room(size)
        self.folders = [FailingFolder(DirectoryFolder(path)) for _ in range(size)]
        self.publishers = [
            StoreWeights(WeightStore(folder), FAST, dtype, _Peer(self.room, rank), *scratch[rank : rank + 1])
            for rank, folder in enumerate(self.folders)
        ]

    def all(self, work: Callable[[int, StoreWeights], Any]) -> list[Any]:
        """What `work` returns or raises on each."""

        def run(rank: int) -> Any:
            try:
                return work(rank, self.publishers[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.room.size) as pool:
            return list(pool.map(run, range(self.room.size)))

    def publish(self, step: int) -> list[Any]:
        return self.all(lambda rank, one: one.publish(version_at(step), _parts(step, rank, self.room.size)))

    def flush(self) -> list[Any]:
        return self.all(lambda _, one: one.flush())

    def close(self) -> list[Any]:
        return self.all(lambda _, one: one.close())


def _parts(step: int, rank: int, size: int) -> dict[str, Tensor]:
    """Of the rank, as FSDP cuts: the last ranks may have nothing of a short tensor."""
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors_at(step).items():
        rows = -(-len(tensor) // size)
        start, stop = min(rank * rows, len(tensor)), min((rank + 1) * rows, len(tensor))
        if start < stop:
            parts[Part(name, start, stop, len(tensor)).stored_name] = tensor[start:stop]
    return parts


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_parts_of_all_ranks_make_the_tensors_that_one_process_publishes(size: int, tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, size)
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    for step in range(7):
        manifests = ranks.publish(step)
        assert all(manifest == manifests[0] for manifest in manifests)
        found = subscriber.fetch(manifests[0])
        assert_is(step, found)
        assert all(tensor.is_contiguous() for tensor in found.values())
        check_tensors(manifests[0], found)
    assert ranks.close() == [None] * size
    assert (subscriber.counters.snapshots, subscriber.counters.deltas) == (1, 6)
    late = Subscriber(WeightStore.open(str(tmp_path)))
    assert_is(6, late.fetch(manifests[0]))


def test_parts_are_rounded_as_whole_tensors_are(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path / "parts", 2, torch.bfloat16)
    manifest = ranks.publish(1)[0]
    ranks.close()
    found = Subscriber(WeightStore.open(str(tmp_path / "parts"))).fetch(manifest)
    with StoreWeights(WeightStore.open(str(tmp_path / "whole")), FAST, torch.bfloat16) as publisher:
        gathered = publisher.fetch(publisher.publish(version_at(1), tensors_at(1)))
    assert found.keys() == gathered.keys()
    assert all(torch.equal(found[name], gathered[name]) for name in gathered)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("refused", ["delta", "commits"])
def test_what_one_rank_cannot_write_is_no_version_on_any(refused: str, failing: int, tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, 2)
    subscriber = Subscriber(WeightStore.open(str(tmp_path)), wait_s=0.1)
    first = ranks.publish(0)[0]
    ranks.flush()
    subscriber.fetch(first)
    ranks.folders[failing].refuse_writes = {refused}
    lost = ranks.publish(1)[0]
    outcomes = ranks.flush()
    ranks.folders[failing].refuse_writes = set()
    if refused == "commits" and failing == 1:
        assert outcomes == [None, None], "only the first rank commits"
        assert_is(1, subscriber.fetch(lost))
    else:
        assert [type(outcome) for outcome in outcomes] == [StoreError, StoreError]
        with pytest.raises(WeightUpdateError, match="did not appear"):
            subscriber.fetch(lost)
        assert WeightStore.open(str(tmp_path)).folder.list("files/000000000002") == []
    third = ranks.publish(2)[0]
    ranks.flush()
    assert_is(2, subscriber.fetch(third))
    assert subscriber.counters.fallbacks == 0
    ranks.close()


@pytest.mark.parametrize("exchange", range(1, 4))
def test_a_rank_that_dies_leaves_the_old_version_and_room_for_the_next_run(
    exchange: int, tmp_path: Path
) -> None:
    """Wherever in a publication it is: before anything, before and after files are written."""
    ranks = _Ranks(tmp_path, 2)
    first = ranks.publish(0)[0]
    ranks.flush()
    ranks.room.dies = (1, 5 + exchange)
    outcomes = ranks.publish(1)
    failures = [one for one in [*outcomes, *ranks.flush()] if isinstance(one, Exception)]
    assert failures and all(isinstance(one, RankError) for one in failures)
    store = WeightStore.open(str(tmp_path))
    versions = [commit.version.step for commit in store.commits().values()]
    assert versions == [0]
    assert_is(0, Subscriber(store).fetch(first))
    ranks.close()
    again = _Ranks(tmp_path, 2)
    manifest = again.publish(1)[0]
    again.close()
    assert_is(1, Subscriber(store).fetch(manifest))
    kept = {file.name for commit in store.commits().values() for file in commit.files}
    assert set(store.folder.list("files")) == kept


@pytest.mark.parametrize("exchange", [4, 5])
def test_a_rank_that_dies_once_all_is_committed_loses_nothing(exchange: int, tmp_path: Path) -> None:
    """When the first rank tells that it has committed, and tidied up."""
    ranks = _Ranks(tmp_path, 2)
    ranks.room.dies = (1, exchange)
    manifest = ranks.publish(0)[0]
    ranks.flush()
    assert_is(0, Subscriber(WeightStore.open(str(tmp_path))).fetch(manifest))
    ranks.close()


def test_one_process_may_publish_alone_before_others_join_it(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    room = _Room(1)
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        assert_is(0, subscriber.fetch(publisher.publish(version_at(0), tensors_at(0))))
        publisher.join(_Peer(room, 0))
        manifest = publisher.publish(version_at(1), _parts(1, 0, 1))
        assert_is(1, subscriber.fetch(manifest))
        with pytest.raises(WeightUpdateError, match="published whole"):
            publisher.fetch(manifest)


@given(st.text(min_size=1, max_size=20), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_names_of_parts_say_what_they_are(name: str, rows: int, before: int, after: int) -> None:
    part = Part(name, before, before + rows, before + rows + after)
    assert parse_part(part.stored_name) == part
    assert Part(name, 0, rows, rows).stored_name == name


def _entries(*stored: str) -> list[TensorEntry]:
    parts = [(name, parse_part(name)) for name in stored]
    return [
        describe_tensor(name, torch.zeros((4 if part is None else part.stop - part.start, 3)))
        for name, part in parts
    ]


@pytest.mark.parametrize(
    "stored",
    [
        ("w[0:2/4]",),
        ("w[2:4/4]",),
        ("w[0:2/4]", "w[3:4/4]"),
        ("w[0:3/4]", "w[2:4/4]"),
        ("w[0:2/4]", "w[2:4/5]"),
        ("w[0:2/4]", "w[2:4/4]", "w"),
        ("w", "w"),
        ("w[0:2/4]", "w[0:2/4]", "w[2:4/4]"),
    ],
)
def test_parts_that_make_no_whole_are_refused(stored: tuple[str, ...]) -> None:
    with pytest.raises(WeightUpdateError):
        join_entries(_entries(*stored))


def test_parts_of_other_shapes_and_types_are_refused() -> None:
    first, second = _entries("w[0:2/4]", "w[2:4/4]")
    assert join_entries([second, first])[0].cuts == (2, 2)
    for wrong in (
        replace(second, shape=(2, 4)),
        replace(second, dtype="int32"),
        replace(second, shape=(1, 3)),
    ):
        with pytest.raises(WeightUpdateError, match="fit"):
            join_entries([first, wrong])


def test_a_manifest_of_parts_tells_other_weights(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, 2)
    manifest = ranks.publish(0)[0]
    ranks.close()
    found = dict(Subscriber(WeightStore.open(str(tmp_path))).fetch(manifest))
    for name in found:
        other = found | {name: found[name] + 1}
        with pytest.raises(WeightUpdateError, match="differs"):
            check_tensors(manifest, other)
    with pytest.raises(WeightUpdateError, match="differs"):
        check_tensors(manifest, found | {"a": found["a"][:-1]})


def test_a_rank_that_can_keep_nothing_is_an_error_of_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    ranks = _Ranks(tmp_path / "store", 2, scratch=[tmp_path / "scratch", tmp_path / "file"])
    for error in ranks.publish(0):
        assert isinstance(error, StoreError) and error.field == "weights.scratch"
    ranks.close()
