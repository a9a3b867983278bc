import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from etude.agent import AgentSession, JournaledSession, SessionLimits
from etude.agent.tools.state import ToolState
from etude.environment.replay import (
    Replay,
    Replayer,
    check_replayable,
    replay_session,
    replay_turns,
    unified_diff,
)
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.errors import ConfigError, SandboxError, UserError
from etude.protocols import Finished, OnCall, OnResult, Sample
from etude.records import Relation, Status, ToolCall, ToolErrorClass, ToolResult, Trajectory, Turn
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import FINISH, MEND, READ, SOLVES, TASK, TEST
from tests.environment.stored import LIMITS, SUMMARIES, byte_renderer, record
from tests.fakes.faulty_sandbox import FaultyBackend

T = TypeVar("T")

HISTORY = ToolCall("read_file", {"path": ".etude/history/001.md"})
LONG = (*[(READ,)] * 6, (HISTORY,), (MEND,), (FINISH,))


def in_environment_session(
    do: Callable[[EnvironmentSession], Awaitable[T]],
    backend: Any = None,
    trajectory: Trajectory | None = None,
) -> T:
    """Does something with a fresh session on the task; nothing of it is left."""
    inner = backend or MemoryBackend()

    async def run() -> T:
        from etude.agent import core_registry

        env_session = EnvironmentSession.begin(SessionServices(inner, Grader(inner), core_registry()), TASK)
        try:
            return await do(env_session)
        finally:
            await env_session.close()

    return asyncio.run(run())


def replayed(trajectory: Trajectory, backend: Any = None, turns: int | None = None) -> Replay:
    return in_environment_session(
        lambda env_session: replay_turns(trajectory, Replayer(env_session, env_session.context), turns),
        backend,
    )


def new_session(trajectory: Trajectory, summary: bool = False) -> AgentSession:
    return AgentSession(
        TASK.instruction, byte_renderer(), trajectory.id, LIMITS, summary=SUMMARIES if summary else None
    )


def told(trajectory: Trajectory, session: AgentSession, turns: int | None = None) -> Replay:
    return in_environment_session(
        lambda env_session: replay_session(
            trajectory, session, Replayer(env_session, env_session.context), turns
        )
    )


def with_turn(trajectory: Trajectory, number: int, **changes: Any) -> Trajectory:
    turns = list(trajectory.turns)
    turns[number] = replace(turns[number], **changes)
    return replace(trajectory, turns=tuple(turns))


def test_the_same_calls_have_the_same_answers() -> None:
    backend = MemoryBackend()
    replay = replayed(record(TASK, SOLVES), backend)
    assert replay.equal
    assert (replay.num_turns, replay.num_calls) == (4, 4)
    assert not backend.live


def test_calls_are_made_up_to_the_turn_that_is_named() -> None:
    assert replayed(record(TASK, SOLVES), turns=2).num_calls == 2


def test_another_answer_is_reported_with_turn_call_and_lines() -> None:
    one = record(TASK, ((READ, TEST), *SOLVES))
    before = one.turns[0].results
    other = replace(before[1], output=before[1].output + "\nsomething else", finished=True)
    replay = replayed(with_turn(one, 0, results=(before[0], other)))
    (difference,) = replay.differences
    assert (difference.turn, difference.position, difference.call.name) == (0, 1, "run_tests")
    lines = unified_diff(difference)
    assert "-something else" in lines
    assert "-[finished: True]" in lines
    assert not replay.equal


def test_durations_and_facts_are_not_compared() -> None:
    one = record(TASK, SOLVES)
    (result,) = one.turns[0].results
    changed = with_turn(one, 0, results=(replace(result, duration_s=99.0, facts={"x": 1}),))
    assert replayed(changed).equal


def test_an_answer_that_tells_another_duration_only_is_no_difference() -> None:
    one = record(TASK, SOLVES)
    (result,) = one.turns[2].results
    was = replace(result, output=f"{result.output} in 0.01s")
    changed = with_turn(one, 2, results=(was,))

    class Timed(Slow):
        async def run_calls(
            self,
            calls: Sequence[ToolCall],
            known: Mapping[int, ToolResult],
            on_call: OnCall,
            on_result: OnResult,
        ) -> list[ToolResult]:
            turn = next(turn for turn in one.turns if turn.calls == tuple(calls))
            if turn is one.turns[2]:
                return [replace(result, output=f"{result.output} in 3 s")]
            return list(turn.results)

    async def do(env_session: EnvironmentSession) -> Replay:
        return await replay_turns(changed, Replayer(Timed(), env_session.context))

    replay = in_environment_session(do)
    assert replay.equal
    assert [difference.turn for difference in replay.slower] == [2]


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("ask_user", None, "asked a person"),
        ("edit_lines", ToolErrorClass.USER_ABORTED, "was refused"),
        ("run_command", ToolErrorClass.PROVIDER, "failed"),
        ("browse", None, "no such tool"),
    ],
)
def test_what_cannot_be_made_again_is_named_and_answered_from_the_record(
    name: str, error: ToolErrorClass | None, reason: str
) -> None:
    one = record(TASK, SOLVES)
    answer = ToolResult("recorded", error)
    calls, results = (ToolCall(name, {"q": "x"}), READ), (answer, *one.turns[0].results)
    replay = replayed(with_turn(one, 0, calls=calls, results=results))
    assert replay.equal
    (kept,) = replay.from_record
    assert (kept.turn, kept.position, kept.call.name) == (0, 0, name)
    assert reason in kept.reason
    assert replay.num_calls == 4


def test_an_unknown_tool_that_was_unknown_then_is_made_again() -> None:
    one = record(TASK, ((ToolCall("edit_lines", {}),), (FINISH,)))
    replay = replayed(one)
    assert replay.equal
    assert not replay.from_record


def test_a_sandbox_that_fails_is_no_difference() -> None:
    backend = MemoryBackend()
    with pytest.raises(SandboxError):
        replayed(record(TASK, SOLVES), FaultyBackend(backend, {"create": 99}))
    assert not backend.live


class Slow:
    """A workspace that never answers."""

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        await asyncio.sleep(3600)
        return []

    async def archive(self, path: str, text: str) -> str:
        return "disk full"


def test_a_turn_has_a_deadline() -> None:
    one = record(TASK, SOLVES)

    async def do(env_session: EnvironmentSession) -> Replay:
        return await replay_turns(one, Replayer(Slow(), env_session.context, deadline_s=0.05))

    with pytest.raises(SandboxError, match="not done"):
        in_environment_session(do)


def test_a_context_that_cannot_be_kept_ends_the_replay() -> None:
    one = record(TASK, LONG, summary=SUMMARIES)

    class Full(Slow):
        async def run_calls(
            self,
            calls: Sequence[ToolCall],
            known: Mapping[int, ToolResult],
            on_call: OnCall,
            on_result: OnResult,
        ) -> list[ToolResult]:
            turn = next(turn for turn in one.turns if turn.calls == tuple(calls))
            return list(turn.results)

    async def do(env_session: EnvironmentSession) -> Replay:
        return await replay_session(
            one, new_session(one, summary=True), Replayer(Full(), env_session.context)
        )

    with pytest.raises(SandboxError, match="disk full"):
        in_environment_session(do)


def test_a_chain_is_told_again_bit_for_bit_with_its_history_files() -> None:
    one = record(TASK, LONG, summary=SUMMARIES)
    assert len(one.segments) >= 3
    (read,) = next(turn for turn in one.turns if turn.calls == (HISTORY,)).results
    assert "### result 1" in read.output
    session = new_session(one, summary=True)
    assert session.harness_digest == one.harness_digest
    replay = told(one, session)
    assert replay.equal
    assert replay.num_turns == len(one.turns)
    assert session.status is Status.DONE
    for segment, mine in zip(one.segments, session.segments(), strict=True):
        assert (mine.id, mine.parent, mine.relation) == (segment.id, segment.parent, segment.relation)
        for name in ("tokens", "sampled", "logprobs"):
            assert np.array_equal(getattr(mine, name), getattr(segment, name))
        assert mine.version_spans == segment.version_spans
    assert session.turns == list(one.turns)
    # Without a session nobody makes the files again, and that shows.
    plain = replayed(one)
    assert [difference.call for difference in plain.differences] == [HISTORY]
    assert "history of full contexts" in plain.notes[0]


@pytest.mark.parametrize("turns", range(12))
def test_a_session_is_as_it_was_after_any_turn(turns: int) -> None:
    one = record(TASK, LONG, summary=SUMMARIES)
    session = new_session(one, summary=True)
    told(one, session, turns)
    following = one.turns[turns] if turns < len(one.turns) else None
    action = session.next_action()
    if following is None:
        assert isinstance(action, Finished)
        return
    assert isinstance(action, Sample)
    (segment,) = [segment for segment in one.segments if segment.id == following.segment_id]
    assert np.array_equal(action.tokens, segment.tokens[: following.start])
    assert action.summarising == (not following.calls)


def test_a_journal_that_was_told_can_be_taken_up(tmp_path: Any) -> None:
    one = record(TASK, SOLVES)
    session = new_session(one)
    journal = JournaledSession.create(tmp_path / "journal", session, ToolState())

    async def do(env_session: EnvironmentSession) -> Replay:
        return await replay_session(one, session, Replayer(env_session, env_session.context), 2, journal)

    in_environment_session(do)
    journal.close()
    resumed = JournaledSession.resume(tmp_path / "journal", byte_renderer(), {})
    action = resumed.next_action()
    resumed.close()
    assert isinstance(action, Sample)
    assert np.array_equal(action.tokens, one.segments[0].tokens[: one.turns[2].start])


def test_another_answer_leaves_the_tokens_as_they_were() -> None:
    one = record(TASK, SOLVES)
    (result,) = one.turns[0].results
    spoilt = replace(TASK, files={**TASK.files, "lib/tally.py": "def tally(xs):\n    return 0\n"})
    session = new_session(one)

    async def run() -> Replay:
        from etude.agent import core_registry

        backend = MemoryBackend()
        env_session = EnvironmentSession.begin(
            SessionServices(backend, Grader(backend), core_registry()), spoilt
        )
        try:
            return await replay_session(one, session, Replayer(env_session, env_session.context), 1)
        finally:
            await env_session.close()

    replay = asyncio.run(run())
    assert [difference.turn for difference in replay.differences] == [0]
    assert session.turns[0].results == (result,)


def test_tokens_that_the_harness_would_not_show_are_refused() -> None:
    one = record(TASK, SOLVES)
    (segment,) = one.segments
    tokens = segment.tokens.copy()
    tokens[one.turns[1].start - 3] += 1
    changed = replace(one, segments=(replace(segment, tokens=tokens),))
    with pytest.raises(ConfigError) as raised:
        told(changed, new_session(changed))
    assert raised.value.field == "turn 2"


def test_another_limit_is_noticed_where_the_session_would_have_ended() -> None:
    one = record(TASK, SOLVES)
    session = AgentSession(
        TASK.instruction, byte_renderer(), one.id, SessionLimits(max_turns=2, max_tokens=2048)
    )
    with pytest.raises(UserError) as raised:
        told(one, session)
    assert raised.value.field == "turn 3"


@pytest.mark.parametrize("relation", [Relation.FORK, Relation.REWRITE, Relation.SUBAGENT])
def test_trees_are_no_single_session(relation: Relation) -> None:
    one = record(TASK, SOLVES)
    (segment,) = one.segments
    branch = replace(segment, id="branch", relation=relation, parent=(segment.id, 3))
    with pytest.raises(UserError, match="forks, rewrites or sub-agents"):
        check_replayable(replace(one, segments=(segment, branch)))


def test_words_without_tokens_make_no_session() -> None:
    one = record(TASK, SOLVES)
    turn = Turn(one.segments[0].id, 0, 0, "words", (), ())
    with pytest.raises(UserError) as raised:
        check_replayable(replace(one, turns=(turn,)))
    assert raised.value.field == "turn 1"
