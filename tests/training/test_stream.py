"""The recorded stream: in order, by version, each prompt once, and exactly so whatever dies in between."""

from __future__ import annotations

import multiprocessing
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.signal import as_surplus
from etude.config import RlConfig
from etude.errors import CheckpointError, StoreError
from etude.model.scoring import score_sequences
from etude.records import Group, GroupOrigin, PolicyVersion, RewardBreakdown, TrajectoryId, VersionSpan
from etude.store.blobs import FileBlobs
from etude.store.trajectories import TrajectoryLog
from etude.training import load_checkpoint
from etude.training.stream import RecordedStream, prompt_digest
from tests.model.builders import fresh_routes, small_model
from tests.training.builders import PROMPT, Rollouts, as_group
from tests.training.stream_worker import consume


def group_of(
    rollouts: Rollouts,
    number: int,
    rewards: tuple[float, ...] = (1.0, 0.0),
    prompt: int | None = None,
    step: int = 0,
) -> Group:
    """A group of one prompt of its own, or of `prompt`, sampled at policy version `step`."""
    opening = np.random.default_rng(number if prompt is None else prompt).integers(0, 64, PROMPT)
    members = []
    for index, reward in enumerate(rewards):
        member = rollouts.member(reward)
        (segment,) = member.segments
        tokens = segment.tokens.copy()
        tokens[:PROMPT] = opening
        scores = score_sequences(rollouts.model, [tokens])[0]
        segment = replace(
            segment,
            id=f"{number}/{index}",
            tokens=tokens,
            logprobs=np.where(segment.sampled, scores, 0.0).astype(np.float32),
            version_spans=(VersionSpan(0, len(tokens), PolicyVersion("run", step)),),
            routes=rollouts.blobs.put(fresh_routes(rollouts.model, tokens)),
        )
        identity = TrajectoryId("run", f"task{number}", 0, number, index)
        members.append(replace(member, id=identity, segments=(segment,)))
    return replace(as_group(members), id=f"g{number}")


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    return Rollouts(small_model(0))


def stream_over(log: TrajectoryLog, state: Any = None, **stream: Any) -> RecordedStream:
    config = RlConfig.model_validate({"stream": stream})
    return RecordedStream(log, config, state)


def names(groups: list[Group]) -> list[str]:
    return [group.id for group in groups]


def test_groups_come_in_the_order_of_storage_over_parts(tmp_path: Path, rollouts: Rollouts) -> None:
    log = TrajectoryLog(tmp_path)
    for numbers in ([0, 1, 2], [3], [4, 5]):
        log.append([group_of(rollouts, number) for number in numbers])
    stream = stream_over(log)
    assert names(stream.next_groups(2)) == ["g0", "g1"]
    assert names(stream.next_groups(3)) == ["g2", "g3", "g4"]
    assert names(stream.next_groups(3)) == ["g5"]
    assert stream.next_groups(3) == []
    assert stream.num_taken == 6


def test_what_is_passed_over_is_counted_by_reason(tmp_path: Path, rollouts: Rollouts) -> None:
    log = TrajectoryLog(tmp_path)
    log.append(
        [
            group_of(rollouts, 0, step=1),
            group_of(rollouts, 1, step=3),
            group_of(rollouts, 2, (1.0, 1.0), step=3),
            group_of(rollouts, 3, prompt=1, step=4),
            group_of(rollouts, 4, step=4),
            group_of(rollouts, 5, step=5),
            group_of(rollouts, 6, (float("nan"), 1.0), step=4),
            replace(group_of(rollouts, 7), members=()),
        ]
    )
    stream = stream_over(log, min_step=2, max_step=4)
    assert names(stream.next_groups(10)) == ["g1", "g4"]
    assert stream.passed == {"version": 3, "no_signal": 2, "repeated": 1}
    assert names(stream_over(log, min_step=2, max_step=4, repeat_prompts=True).next_groups(10)) == [
        "g1",
        "g3",
        "g4",
    ]


def test_a_step_has_as_many_groups_of_differing_verdicts_as_asked_for_and_those_of_one_verdict_on_top(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    """As the run had them: one function tells both what a group teaches."""
    log = TrajectoryLog(tmp_path)
    priced = group_of(rollouts, 2, (1.0, 1.0))
    dearer = replace(priced.members[0], reward=RewardBreakdown(1.0, {"length": -0.1}))
    priced = replace(priced, members=(dearer, priced.members[1]))
    unpriced = replace(group_of(rollouts, 3, (1.0, 1.0)), price_weight=0.0)
    unpriced = replace(unpriced, members=tuple(replace(m, reward=dearer.reward) for m in unpriced.members))
    log.append([group_of(rollouts, 0), group_of(rollouts, 1), priced, unpriced])
    log.append([group_of(rollouts, number) for number in (4, 5)])
    stream = stream_over(log)
    assert names(stream.next_groups(2)) == ["g0", "g1", "g2"]
    assert names(stream.next_groups(1)) == ["g4"]
    assert names(stream_over(log, stream.state_dict()).next_groups(1)) == ["g5"]
    assert stream.passed == {"no_signal": 1}


def test_groups_that_the_run_had_no_need_of_are_passed_over(tmp_path: Path, rollouts: Rollouts) -> None:
    log = TrajectoryLog(tmp_path)
    log.append([group_of(rollouts, 0), as_surplus(group_of(rollouts, 1)), group_of(rollouts, 2)])
    stream = stream_over(log)
    assert names(stream.next_groups(3)) == ["g0", "g2"]
    assert stream.passed == {"surplus": 1}


def test_forks_of_one_session_are_prompts_of_their_own(rollouts: Rollouts) -> None:
    group = group_of(rollouts, 0)
    forks = [replace(group, kind="fork", origin=GroupOrigin("s", at, "snapshot")) for at in (8, 9)]
    assert len({prompt_digest(one) for one in (group, *forks)}) == 3
    assert prompt_digest(group) == prompt_digest(group_of(rollouts, 1, prompt=0))


def test_what_another_process_appends_is_seen(tmp_path: Path, rollouts: Rollouts) -> None:
    TrajectoryLog(tmp_path).append([group_of(rollouts, 0)])
    stream = stream_over(TrajectoryLog(tmp_path))
    assert names(stream.next_groups(5)) == ["g0"]
    TrajectoryLog(tmp_path).append([group_of(rollouts, 1)])
    assert names(stream.next_groups(5)) == ["g1"]


def test_waiting_for_more_ends_with_the_deadline_or_at_once_when_stopped(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    log = TrajectoryLog(tmp_path)
    log.append([group_of(rollouts, 0)])
    began = time.monotonic()
    assert names(stream_over(log, wait_s=0.3).next_groups(2)) == ["g0"]
    assert 0.3 <= time.monotonic() - began < 30
    stream = stream_over(log, wait_s=3600.0)
    assert stream.next_groups(2, lambda: True) == []
    assert (stream.num_taken, names(stream.next_groups(1))) == (0, ["g0"]), "what was found comes again"

    def append() -> bool:
        TrajectoryLog(tmp_path).append([group_of(rollouts, 1)])
        return False

    assert names(stream.next_groups(1, append)) == ["g1"]


class _SlowLog(TrajectoryLog):
    """A log that takes its time."""

    def read_part(self, name: str) -> list[Group]:
        time.sleep(0.5)
        return super().read_part(name)


def test_reading_a_long_log_is_no_waiting_at_its_end(tmp_path: Path, rollouts: Rollouts) -> None:
    log = _SlowLog(tmp_path)
    log.append([group_of(rollouts, 0)])

    def append() -> bool:
        TrajectoryLog(tmp_path).append([group_of(rollouts, 1)])
        return False

    assert names(stream_over(log, wait_s=0.3).next_groups(2, append)) == ["g0", "g1"]


def test_a_part_that_is_damaged_is_refused_by_name(tmp_path: Path, rollouts: Rollouts) -> None:
    TrajectoryLog(tmp_path).append([group_of(rollouts, 0)])
    (part,) = tmp_path.glob("*.parquet")
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(StoreError) as caught:
        stream_over(TrajectoryLog(tmp_path)).next_groups(1)
    assert caught.value.field == part.name


@pytest.mark.parametrize(
    "state", [{}, {"part": "x"}, {"part": "", "group": "y", "prompts": [], "passed": {}}]
)
def test_a_cursor_that_is_none_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no cursor"):
        stream_over(TrajectoryLog(tmp_path), state)


def test_a_cursor_of_another_log_is_refused(tmp_path: Path, rollouts: Rollouts) -> None:
    TrajectoryLog(tmp_path / "a").append([group_of(rollouts, 0)])
    stream = stream_over(TrajectoryLog(tmp_path / "a"))
    stream.next_groups(1)
    TrajectoryLog(tmp_path / "b").append([group_of(rollouts, 1)])
    with pytest.raises(CheckpointError, match="lacks the part"):
        stream_over(TrajectoryLog(tmp_path / "b"), stream.state_dict())


@pytest.fixture(scope="module")
def mixed_log(tmp_path_factory: pytest.TempPathFactory, rollouts: Rollouts) -> Path:
    """Eight groups in three parts, one without signal and one with a prompt that came before."""
    directory = tmp_path_factory.mktemp("log")
    log = TrajectoryLog(directory)
    log.append([group_of(rollouts, 0), group_of(rollouts, 1, (0.0, 0.0)), group_of(rollouts, 2)])
    log.append([group_of(rollouts, 3, prompt=0), group_of(rollouts, 4)])
    log.append([group_of(rollouts, 5), group_of(rollouts, 6), group_of(rollouts, 7)])
    return directory


@given(steps=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=12))
def test_restarts_at_saved_cursors_lose_repeat_and_skip_nothing(
    mixed_log: Path, steps: list[tuple[int, bool, bool]]
) -> None:
    """Each step takes groups, may save, and may die: what was not saved comes again, all else once."""
    stream = stream_over(TrajectoryLog(mixed_log))
    saved, committed, pending = stream.state_dict(), list[str](), list[str]()
    for count, saves, dies in steps:
        pending += names(stream.next_groups(count))
        if saves:
            saved, committed, pending = stream.state_dict(), [*committed, *pending], []
        if dies:
            stream, pending = stream_over(TrajectoryLog(mixed_log), saved), []
    committed += [*pending, *names(stream.next_groups(10))]
    assert committed == ["g0", "g2", "g4", "g5", "g6", "g7"]
    assert stream.passed == {"no_signal": 1, "repeated": 1}


def _consume_elsewhere(directory: Path, kill_at: int) -> int:
    """Exit code of a consumer in another process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["etude.training", "etude.training.stream", "etude.store.trajectories"])
    process = context.Process(target=consume, args=(directory, kill_at))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.slow
def test_a_consumer_killed_at_any_moment_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Groups taken, step taken, each fsync of the checkpoint, checkpoint saved: seven deaths in one run."""
    rollouts = Rollouts(small_model(9))
    rollouts.blobs = FileBlobs(tmp_path / "routes")  # type: ignore[assignment]
    groups = [group_of(rollouts, number, (1.0, 0.0) if number != 2 else (0.0, 0.0)) for number in range(10)]
    for directory in ("whole", "broken"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "routes").symlink_to(tmp_path / "routes")
        log = TrajectoryLog(tmp_path / directory / "trajectories")
        log.append(groups[:3])
        log.append(groups[3:])
    assert _consume_elsewhere(tmp_path / "whole", 0) == 0
    for moment in (1, 2, 5, 9, 10, 11, 4):
        assert _consume_elsewhere(tmp_path / "broken", moment) == -signal.SIGKILL, moment
    assert _consume_elsewhere(tmp_path / "broken", 0) == 0
    (model, state), (expected, complete) = (
        load_checkpoint(tmp_path / directory / "checkpoint") for directory in ("broken", "whole")
    )
    assert state is not None and complete is not None
    assert state["trained"] == complete["trained"] == ["g0", "g1", "g3", "g4", "g5", "g6", "g7", "g8"]
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name


def _apart(group: Group, expected: int = 2) -> list[Group]:
    """Its members as they are recorded: each stored by itself, under the group's id."""
    return [replace(group, expected=expected, members=(member,)) for member in group.members]


def test_members_that_were_stored_alone_are_joined_by_the_groups_id(tmp_path: Path) -> None:
    rollouts, config = Rollouts(small_model()), RlConfig()
    log = TrajectoryLog(tmp_path)
    first, second = group_of(rollouts, 0), group_of(rollouts, 1)
    one, other = _apart(first), _apart(second)
    for group in (one[1], other[0], one[0], group_of(rollouts, 2)):
        log.append([group])
    stream = RecordedStream(log, config)
    (joined,) = stream.next_groups(1)
    assert [member.id for member in joined.members] == [member.id for member in first.members]
    resumed = RecordedStream(log, config, stream.state_dict())
    assert [group.id for group in resumed.next_groups(1)] == ["g2"]
    log.append([other[1]])
    again = RecordedStream(log, config, resumed.state_dict())
    (joined,) = again.next_groups(1)
    assert [member.id for member in joined.members] == [member.id for member in second.members]
    assert not again.next_groups(1) and not again.passed


def test_a_group_of_which_members_are_missing_comes_at_the_logs_end(tmp_path: Path) -> None:
    rollouts, config = Rollouts(small_model()), RlConfig()
    log = TrajectoryLog(tmp_path)
    for group in (*_apart(group_of(rollouts, 0), expected=0), *_apart(group_of(rollouts, 1), expected=3)):
        log.append([group])
    log.append([_apart(group_of(rollouts, 2))[0], group_of(rollouts, 3)])
    stream = RecordedStream(log, config)
    assert [[group.id for group in stream.next_groups(1)] for _ in range(4)] == [["g3"], ["g0"], ["g1"], []]
    assert stream.passed == {"no_signal": 1}, "a session alone teaches nothing"


def test_a_group_whose_members_still_arrive_is_waited_for(tmp_path: Path, rollouts: Rollouts) -> None:
    """Each member comes within the time in which nothing must have been added, all of them do not."""
    members = _apart(group_of(rollouts, 0, (1.0, 0.0, 1.0, 0.0)), expected=4)
    log = TrajectoryLog(tmp_path)
    log.append([members.pop()])
    appended_s = time.monotonic()

    def append() -> bool:
        nonlocal appended_s
        if members and time.monotonic() - appended_s > 0.3:
            TrajectoryLog(tmp_path).append([members.pop()])
            appended_s = time.monotonic()
        return False

    stream = stream_over(log, wait_s=0.7)
    (group,) = stream.next_groups(1, append)
    assert len(group.members) == 4 and not stream.passed


def test_members_of_two_tenants_are_never_joined(tmp_path: Path, rollouts: Rollouts) -> None:
    log = TrajectoryLog(tmp_path)
    one, other = (replace(group_of(rollouts, number), id="same") for number in (0, 1))
    apart = [
        replace(group, members=(replace(group.members[0], tenant=tenant),))
        for pair in zip(_apart(one), _apart(other), strict=True)
        for tenant, group in zip("ab", pair, strict=True)
    ]
    for group in apart[:3]:
        log.append([group])
    stream = stream_over(log)
    assert [{member.tenant for member in group.members} for group in stream.next_groups(1)] == [{"a"}]
    log.append([apart[3]])
    resumed = stream_over(log, stream.state_dict())
    assert [{member.tenant for member in group.members} for group in resumed.next_groups(1)] == [{"b"}]
