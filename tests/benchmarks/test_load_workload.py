"""Synthetic sessions have the requested shape; recorded ones have the stored lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.load import LogNormal, WorkloadShape, synthetic_sessions
from benchmarks.load.recorded import recorded_sessions, session_of
from benchmarks.load.workload import shorten
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, StoreError, UserError
from etude.store import TrajectoryLog, trajectory_to_atif
from tests.store.builders import make_group, make_trajectory


def test_a_session_too_long_for_a_model_keeps_its_turns_and_their_proportions() -> None:
    (session,) = synthetic_sessions(WorkloadShape(num_sessions=1))
    total = sum(turn.input_tokens + turn.output_tokens for turn in session.turns)
    assert shorten(session, total) is session
    half = shorten(session, total // 2)
    assert len(half.turns) == 6
    assert 0.95 * total / 2 < sum(turn.input_tokens + turn.output_tokens for turn in half.turns) <= total / 2
    ratios = [new.input_tokens / old.input_tokens for new, old in zip(half.turns, session.turns, strict=True)]
    assert ratios == pytest.approx([0.5] * 6, abs=0.05)


def test_the_default_workload_is_the_engines_benchmark() -> None:
    sessions = synthetic_sessions(WorkloadShape(num_sessions=400))
    assert all(len(session.turns) == 6 for session in sessions)
    first = [session.turns[0].input_tokens for session in sessions]
    later = [turn.input_tokens for session in sessions for turn in session.turns[1:]]
    output = [turn.output_tokens for session in sessions for turn in session.turns]
    assert (min(first) >= 200, max(first) <= 800) == (True, True)
    assert (min(later) >= 20, max(later) <= 200) == (True, True)
    assert np.median(output) == pytest.approx(40, rel=0.1)
    assert np.percentile(output, 99) == pytest.approx(400, rel=0.25)


def test_the_same_seed_gives_the_same_sessions_and_more_of_them_begin_alike() -> None:
    shape = WorkloadShape(num_sessions=8, turns=LogNormal(4, 20))
    assert synthetic_sessions(shape, 3) == synthetic_sessions(shape, 3)
    assert synthetic_sessions(shape, 3) != synthetic_sessions(shape, 4)
    assert synthetic_sessions(replace(shape, num_sessions=16), 3)[:8] == synthetic_sessions(shape, 3)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: WorkloadShape(num_sessions=0),
        lambda: WorkloadShape(prompt_tokens=(5, 4)),
        lambda: WorkloadShape(observation_tokens=(0, 4)),
        lambda: WorkloadShape(turns=LogNormal(0.0, 0.0)),
        lambda: WorkloadShape(output_tokens=LogNormal(0.5, 4.0)),
        lambda: LogNormal(5.0, 4.0),
        lambda: LogNormal(0.0, 4.0),
    ],
)
def test_impossible_shapes_are_refused(broken) -> None:
    with pytest.raises(ConfigError):
        broken()


@given(median=st.floats(0.1, 1e4), spread=st.floats(1.0, 100.0), seed=st.integers(0, 1000))
def test_lengths_are_positive(median: float, spread: float, seed: int) -> None:
    assert LogNormal(median, median * spread).draw(np.random.default_rng(seed)) > 0.0


def test_recorded_sessions_have_the_stored_tokens(tmp_path: Path) -> None:
    group = make_group()
    TrajectoryLog(tmp_path).append([group])
    sessions = recorded_sessions(tmp_path)
    segments = [s for one in group.members for s in one.segments if s.sampled.any()]
    assert len(sessions) == len(segments)
    for session, segment in zip(sessions, segments, strict=True):
        assert session.output_tokens == segment.num_sampled_tokens
        assert session.inputs is not None
        given_tokens = np.concatenate(session.inputs)
        last = int(np.flatnonzero(segment.sampled)[-1])
        np.testing.assert_array_equal(given_tokens, segment.tokens[: last + 1][~segment.sampled[: last + 1]])


def test_atif_files_are_read_one_or_a_directory_of_them(tmp_path: Path) -> None:
    for number in range(2):
        document = trajectory_to_atif(make_trajectory(number))
        (tmp_path / f"{number}.json").write_text(json.dumps(document))
    one, both = recorded_sessions(tmp_path / "0.json"), recorded_sessions(tmp_path)
    assert len(both) == 2 * len(one)
    assert len({session.id for session in both}) == len(both)
    assert recorded_sessions(tmp_path, limit=1)[0].turns == one[0].turns
    (tmp_path / "2.json").write_text("{")
    with pytest.raises(StoreError):
        recorded_sessions(tmp_path)


def test_a_segment_becomes_turns() -> None:
    segment = make_trajectory().segments[0]
    tokens = np.arange(10, dtype=np.int32)
    sampled = np.array([0, 0, 1, 1, 0, 0, 0, 1, 0, 0], dtype=np.bool_)
    span = replace(segment.version_spans[0], start=0, end=10)
    whole = replace(
        segment,
        tokens=tokens,
        sampled=sampled,
        logprobs=np.zeros(10, np.float32),
        version_spans=(span,),
        routes=None,
        turn_spans=(),
    )
    session = session_of(whole)
    assert session is not None and session.inputs is not None
    assert [(turn.input_tokens, turn.output_tokens) for turn in session.turns] == [(2, 2), (3, 1)]
    assert [part.tolist() for part in session.inputs] == [[0, 1], [4, 5, 6]]


def test_a_place_without_sessions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no session"):
        recorded_sessions(tmp_path)
    with pytest.raises(UserError, match="not there"):
        recorded_sessions(tmp_path / "nowhere")
