import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.records import Group, Status, Trajectory, TrajectoryId
from etude.store import FileBlobs, TrajectoryLog
from tests.store.builders import groups, make_group, make_trajectory, same, trees


@pytest.mark.slow
@given(st.data())
def test_what_is_stored_comes_back_equal(data: st.DataObject) -> None:
    stored = [data.draw(groups(first_index=10 * number)) for number in range(data.draw(st.integers(1, 3)))]
    with TemporaryDirectory() as directory:
        TrajectoryLog(Path(directory)).append(stored)
        read = list(TrajectoryLog(Path(directory)).read())
    assert same(tuple(read), tuple(stored))


@given(trees())
def test_trees_of_segments_come_back_equal_with_their_blobs_by_reference(trajectory: Trajectory) -> None:
    with TemporaryDirectory() as directory:
        blobs = FileBlobs(Path(directory) / "blobs")
        arrays = [
            np.full((len(segment.tokens), 2, 2), at, np.uint8)
            for at, segment in enumerate(trajectory.segments)
        ]
        segments = tuple(
            replace(segment, routes=blobs.put(array), support=blobs.put(array[:, 0]))
            for segment, array in zip(trajectory.segments, arrays, strict=True)
        )
        whole = replace(trajectory, segments=segments)
        TrajectoryLog(Path(directory)).append([Group("g", "task", 1, (whole,))])
        read = TrajectoryLog(Path(directory)).find(whole.id)
        assert same(read, whole)
        assert read is not None
        for segment, array in zip(read.segments, arrays, strict=True):
            assert segment.routes is not None and segment.support is not None
            assert np.array_equal(blobs.get(segment.routes), array)
            assert np.array_equal(blobs.get(segment.support), array[:, 0])


def test_arrays_read_are_writable_and_of_the_recorded_dtypes(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.append([make_group()])
    segment = next(log.read()).members[0].segments[0]
    assert (segment.tokens.dtype, segment.sampled.dtype) == (np.int32, np.bool_)
    segment.tokens[0] = 1


def test_ids_already_stored_are_left_out(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    assert log.append([make_group(0), make_group(1)]) == 16
    resumed = TrajectoryLog(tmp_path)
    assert resumed.contains(make_trajectory(3, group=1).id)
    assert not resumed.contains(TrajectoryId("run", "task", 0, 2, 0))
    assert resumed.append([make_group(1), make_group(2)]) == 8
    assert resumed.append([make_group(1)]) == 0
    assert [group.id for group in TrajectoryLog(tmp_path).read()] == ["g0", "g1", "g2"]
    assert len(resumed) == 24


def test_a_group_partly_stored_keeps_only_its_new_members(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    whole = make_group(0, size=4)
    log.append([Group("g0", "task", 4, whole.members[:1])])
    assert log.append([whole]) == 3
    assert [len(group.members) for group in log.read()] == [1, 3]


def test_the_same_id_twice_in_one_append_is_refused(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    with pytest.raises(StoreError, match="twice"):
        log.append([make_group(0), make_group(0)])
    assert list(log.read()) == []


def filtered(log: TrajectoryLog, **filters: Any) -> list[tuple[str, int]]:
    return [(group.id, len(group.members)) for group in log.read(**filters)]


def test_reading_filters_by_step_status_and_task(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.append([make_group(0, step=1), make_group(1, step=2, task="other")])
    failed = make_trajectory(0, group=2, step=3, status=Status.INFRASTRUCTURE)
    log.append([Group("g2", "task", 2, (failed, make_trajectory(1, group=2, step=4)))])
    assert filtered(log, min_step=2) == [("g1", 8), ("g2", 2)]
    assert filtered(log, max_step=3) == [("g0", 8), ("g1", 8), ("g2", 1)]
    assert filtered(log, statuses={Status.INFRASTRUCTURE}) == [("g2", 1)]
    assert filtered(log, tasks=["other"], min_step=0) == [("g1", 8)]


def test_a_step_filter_leaves_out_what_was_never_sampled(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.append([Group("g0", "task", 1, (make_trajectory(segments=(), turns=()),))])
    assert filtered(log, min_step=0) == []
    assert filtered(log) == [("g0", 1)]


def part(directory: Path) -> Path:
    (found,) = directory.glob("part-*.parquet")
    return found


@pytest.mark.parametrize("where", [0.1, 0.5, 0.99])
def test_a_damaged_part_is_named(tmp_path: Path, where: float) -> None:
    TrajectoryLog(tmp_path).append([make_group()])
    path = part(tmp_path)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError) as raised:
        list(TrajectoryLog(tmp_path).read())
    assert raised.value.field == path.name
    with pytest.raises(StoreError):
        TrajectoryLog(tmp_path).contains(make_trajectory().id)


def test_a_part_that_is_gone_from_the_middle_is_noticed_and_can_be_given_up(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    for index in range(3):
        log.append([make_group(index)])
    whole = list(TrajectoryLog(tmp_path).read())
    gone = sorted(tmp_path.glob("part-*.parquet"))[1]
    gone.unlink()
    again = TrajectoryLog(tmp_path)
    for ask in (lambda: again.append([make_group(9)]), lambda: len(again)):
        with pytest.raises(StoreError, match="missing") as raised:
            ask()
        assert raised.value.field == "part-00000001"
    (tmp_path / "part-00000001.missing").touch()
    assert same(tuple(TrajectoryLog(tmp_path).read()), (whole[0], whole[2]))


def test_a_truncated_part_is_named(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path).append([make_group()])
    path = part(tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreError, match="damaged"):
        list(TrajectoryLog(tmp_path).summaries())


def test_a_half_written_part_is_invisible(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path).append([make_group(0)])
    path = part(tmp_path)
    (tmp_path / f".{path.name}.17.tmp").write_bytes(path.read_bytes()[:100])
    log = TrajectoryLog(tmp_path)
    assert len(log) == 8
    assert log.append([make_group(1)]) == 8


def test_facts_that_json_cannot_hold_are_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    with pytest.raises(StoreError, match="JSON"):
        log.append([Group("g0", "task", 1, (make_trajectory(facts={"x": object()}),))])
    assert len(TrajectoryLog(tmp_path)) == 0


def test_summaries_and_find(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    group = make_group(0, step=5)
    log.append([group])
    first = next(iter(log.summaries()))
    assert (first.id, first.status, first.oldest_step, first.num_turns) == (group.members[0].id, "done", 5, 2)
    assert first.reward == pytest.approx(0.95)
    found = log.find(group.members[3].id)
    assert found is not None
    assert same(found, group.members[3])
    assert log.find(TrajectoryId("run", "none", 0, 0, 0)) is None


def test_any_parquet_reader_can_filter_the_index_columns(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path).append([make_group(step=3)])
    table = pq.read_table(part(tmp_path), columns=["task", "reward", "oldest_step"])
    assert table.column("oldest_step").to_pylist() == [3] * 8
