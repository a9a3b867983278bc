"""Replays a stored trajectory: its calls in a fresh sandbox, its inputs into a new session.

    turns ---- the same calls, in a new sandbox ----> Difference where a result differs
    tokens --- into an AgentSession, as sampled ----> the session as it was after turn N, bit for bit

The session always gets the recorded results, so that its tokens are those that were sampled, whatever the new
sandbox returns. Calls that cannot be repeated (the web, a person's answers, refused calls) get the recorded
result and are listed.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from etude.agent import AgentSession, NextMessage, ToolContext
from etude.agent.journal import INTERRUPTED
from etude.environment.history import DURATIONS, Difference, SessionTurn, causes_of, differences
from etude.environment.running import ignore_event
from etude.errors import AgentError, ConfigError, SandboxError, UserError
from etude.protocols import Archive, Finished, RunCalls, Sample, Session, Workspace
from etude.records import (
    SampleChunk,
    Segment,
    Status,
    Task,
    ToolCall,
    ToolErrorClass,
    ToolResult,
    Trajectory,
    Turn,
)

OUTSIDE_SANDBOX = {
    "ask_user": "asked a person",
    "semantic_search": "needs an index of the code",
}
"""Tools whose answers do not come from the sandbox."""
_DIFF_LINES = 200


@dataclass(frozen=True, slots=True)
class FromRecord:
    """A call that was not repeated: its result is the recorded one."""

    turn: int
    """From 0."""
    position: int
    call: ToolCall
    reason: str


@dataclass(slots=True)
class Replay:
    """The result of replaying a trajectory's calls."""

    num_turns: int = 0
    num_calls: int = 0
    """Calls that were repeated."""
    differences: list[Difference] = field(default_factory=list[Difference])
    from_record: list[FromRecord] = field(default_factory=list[FromRecord])
    notes: list[str] = field(default_factory=list[str])
    """Further remarks, for people."""
    duration_s: float = 0.0

    slower: list[Difference] = field(default_factory=list[Difference])
    """Results that differ in a printed duration only ("1 passed in 0.43s"): not counted as differences."""

    @property
    def equal(self) -> bool:
        """Whether every repeated call had the recorded result, durations aside."""
        return not self.differences


class ReplayHandler:
    """Handles a trajectory's calls while a session is replayed. This one does nothing: for a workspace that
    is already in the state after them."""

    def __init__(self, task: Task | None = None) -> None:
        """`task`: its steps are the user's later instructions."""
        self.replay = Replay()
        self._words = [step.instruction for step in task.steps[1:]] if task is not None else []

    async def turn(self, number: int, turn: Turn) -> None:
        """Called for the calls of turn `number`, from 0."""

    async def archive(self, path: str, text: str) -> None:
        """Called when a full context is to be written to a file."""

    async def next_words(self) -> str | None:
        """The user's next instruction after the agent had finished; None if it is not known."""
        return self._words.pop(0) if self._words else None


class Replayer(ReplayHandler):
    """Repeats the calls of a trajectory, turn by turn, in one workspace. One call at a time."""

    def __init__(
        self,
        workspace: Workspace,
        context: ToolContext,
        deadline_s: float = 600.0,
        next_step: NextMessage | None = None,
    ) -> None:
        """`workspace`: in the state in which the trajectory began; `context`: that of its tools. If it has a
        user, that one is asked the questions. `deadline_s`: wall time of one turn. `next_step`: begins the
        task's next step in the workspace."""
        super().__init__()
        self._workspace = workspace
        self._context = context
        self._deadline_s = deadline_s
        self._next_step = next_step

    async def turn(self, number: int, turn: Turn) -> None:
        """Repeats the calls of turn `number`, from 0, and records differences.

        Raises SandboxError if the sandbox failed, ended where it had not, or did not answer in time.
        """
        replay, began = self.replay, time.perf_counter()
        replay.num_turns += 1
        known = self._known(number, turn)
        open_calls = len(turn.calls) > len(turn.results)
        if not turn.calls or len(known) == len(turn.calls):
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                results = await self._workspace.run_calls(turn.calls, known, ignore_event, ignore_event)
        except AgentError as error:
            if not open_calls:
                raise SandboxError(
                    f"the sandbox ended, unlike in the recording: {error.message}",
                    field="turn",
                    received=number + 1,
                ) from error
            replay.notes.append(f"turn {number + 1} ended the sandbox, as in the recording")
            return
        except TimeoutError as error:
            raise SandboxError(
                f"the turn was not done after {self._deadline_s:g} s", field="turn", received=number + 1
            ) from error
        finally:
            replay.duration_s += time.perf_counter() - began
        replay.num_calls += len(turn.calls) - len(known)
        if open_calls:
            replay.notes.append(f"turn {number + 1} has no recorded answer, but was answered now")
            return
        # An imported turn may have more results than calls.
        done = SessionTurn(turn.calls, turn.results[: len(turn.calls)])
        for difference in differences(number, done, results):
            only = causes_of(difference)
            (replay.slower if only == (DURATIONS,) else replay.differences).append(difference)

    async def archive(self, path: str, text: str) -> None:
        """Writes a full context to its file, as the harness had. Raises SandboxError."""
        error = await self._workspace.archive(path, text)
        if error:
            raise SandboxError(f"a context could not be written: {error}", field="path", received=path)

    async def next_words(self) -> str | None:
        return await self._next_step() if self._next_step is not None else None

    def _known(self, number: int, turn: Turn) -> dict[int, ToolResult]:
        known: dict[int, ToolResult] = {}
        for position, (call, result) in enumerate(zip(turn.calls, turn.results, strict=False)):
            reason = self._why_not(call, result)
            if reason is not None:
                known[position] = result
                self.replay.from_record.append(FromRecord(number, position, call, reason))
        return known

    def _why_not(self, call: ToolCall, result: ToolResult) -> str | None:
        if call.error is not None:
            return None
        if result.error is ToolErrorClass.USER_ABORTED:
            return "was refused or left unanswered by a person"
        if result.error is ToolErrorClass.PROVIDER:
            return "was interrupted" if result.output == INTERRUPTED else "the service behind it failed"
        context = self._context
        ports = {"ask_user": context.user, "semantic_search": context.search}
        if call.name in OUTSIDE_SANDBOX and ports[call.name] is None:
            return OUTSIDE_SANDBOX[call.name]
        if call.name not in context.tools:
            return "there is no such tool here" if result.error is None else None
        if context.tools[call.name].access(call.arguments).outside:
            return "acts outside of the sandbox"
        return None


async def replay_turns(trajectory: Trajectory, replayer: Replayer, turns: int | None = None) -> Replay:
    """Repeats the calls of the first `turns` turns (None: of all), without a session.

    Files with full contexts, which the harness writes, are missing: see `replay_session`.
    """
    for number, turn in enumerate(trajectory.turns[:turns]):
        await replayer.turn(number, turn)
        if any(result.finished for result in turn.results) and turn is not trajectory.turns[-1]:
            await replayer.next_words()
    if len(trajectory.segments) > 1:
        replayer.replay.notes.append("files with the history of full contexts were not written again")
    return replayer.replay


async def replay_session(
    trajectory: Trajectory,
    session: AgentSession,
    replayer: ReplayHandler,
    turns: int | None = None,
    journal: Session | None = None,
) -> Replay:
    """Feeds the inputs of a trajectory to a new session, up to its turn `turns` (None: all), and passes the
    calls to `replayer`. Afterwards the session is as it was then: with the same tokens and the same next
    action.

    `journal`: a wrapper of `session` that gets the inputs in its place. Raises ConfigError if the session
    would not reach this state (another tokenizer, harness or limit), otherwise as `Replayer.turn`.
    """
    target = journal or session
    check_replayable(trajectory, turns)
    segments = {segment.id: segment for segment in trajectory.segments}
    wanted = trajectory.turns[: len(trajectory.turns) if turns is None else turns]
    number = 0
    while True:
        match target.next_action():
            case Sample() as asked:
                if number == len(wanted):
                    return replayer.replay
                turn = wanted[number]
                _check_tokens(asked, turn, segments[turn.segment_id], number)
                for chunk in chunks_of(segments[turn.segment_id], turn, session.renderer.end_tokens):
                    target.on_chunk(chunk)
                number += 1
                if not turn.calls:
                    replayer.replay.num_turns += 1
            case RunCalls(calls):
                await _run_calls(wanted, number - 1, calls, target, replayer)
            case Archive(path, text):
                await replayer.archive(path, text)
                target.on_archived()
            case Finished():
                words = await replayer.next_words() if number < len(trajectory.turns) else None
                if words is not None:
                    target.on_user(words)
                elif number < len(wanted):
                    raise _ended_before(number)
                else:
                    return replayer.replay


async def _run_calls(
    wanted: Sequence[Turn], number: int, calls: tuple[ToolCall, ...], target: Session, replayer: ReplayHandler
) -> None:
    turn = wanted[number]
    if [(call.name, dict(call.arguments)) for call in calls] != [
        (call.name, dict(call.arguments)) for call in turn.calls
    ]:
        raise _mismatch(number, "the calls of a message are parsed differently now", turn.text[:80])
    await replayer.turn(number, turn)
    if len(turn.results) == len(calls):
        target.on_results(turn.results)
    else:
        target.stop(Status.AGENT_ERROR, "the turn was never answered")


def chunks_of(segment: Segment, turn: Turn, end_tokens: Container[int]) -> list[SampleChunk]:
    """A message as sampled: one chunk for each run of tokens of one policy version, without routes."""
    cuts = {turn.start, turn.end}
    for span in (*segment.version_spans, *segment.kv_oldest_spans):
        cuts |= {at for at in (span.start, span.end) if turn.start < at < turn.end}
    edges = sorted(cuts)
    stopped = turn.end > turn.start and int(segment.tokens[turn.end - 1]) in end_tokens
    chunks: list[SampleChunk] = []
    for start, end in pairwise(edges):
        version = next(span.version for span in segment.version_spans if span.start <= start < span.end)
        oldest = next(
            (span.version for span in segment.kv_oldest_spans if span.start <= start < span.end), version
        )
        last = end == turn.end
        chunks.append(
            SampleChunk(
                segment.tokens[start:end],
                segment.logprobs[start:end],
                version,
                oldest,
                finish=("stop" if stopped else "length") if last else None,
            )
        )
    return chunks


def check_replayable(trajectory: Trajectory, turns: int | None = None) -> None:
    """Raises UserError for a trajectory that cannot be replayed: without tokens, or with forks."""
    segments = {segment.id: segment for segment in trajectory.segments}
    for number, turn in enumerate(trajectory.turns[:turns]):
        segment = segments.get(turn.segment_id)
        if (
            segment is None
            or turn.end <= turn.start
            or not bool(segment.sampled[turn.start : turn.end].all())
        ):
            raise UserError(
                "the message has no sampled tokens, so the session cannot be replayed",
                field=f"turn {number + 1}",
                received=turn.text[:80],
                fix="name a trajectory of a run; ATIF files must carry token ids",
            )
    branches = [segment.id for segment in trajectory.segments if segment.relation not in ("root", "summary")]
    if branches:
        raise UserError(
            "has forks, rewrites or sub-agents, so no single session can be replayed",
            field="ID",
            received=branches[0],
            fix="name a trajectory of one agent, in one context or a chain of them",
        )


def _check_tokens(asked: Sample, turn: Turn, segment: Segment, number: int) -> None:
    same = asked.tokens.shape == (turn.start,) and bool((asked.tokens == segment.tokens[: turn.start]).all())
    if not same:
        raise _mismatch(number, "the agent would have seen other tokens", f"{len(asked.tokens)} tokens")


def _mismatch(number: int, message: str, received: str) -> ConfigError:
    return ConfigError(
        message,
        field=f"turn {number + 1}",
        received=received,
        fix="use the commit, tokenizer and configuration with which it was recorded",
    )


def _ended_before(number: int) -> UserError:
    return UserError(
        "the replayed session ends before this turn: the user continued it, or its limits differed",
        field=f"turn {number + 1}",
        fix="replay only the turns before it, for example with --turn",
    )


def unified_diff(difference: Difference) -> list[str]:
    """How the new answer differs from the recorded one, line by line; at most 200 lines."""
    expected, received = difference.expected, difference.received
    lines = list(
        difflib.unified_diff(
            expected.output.split("\n"), received.output.split("\n"), "recorded", "replayed", lineterm="", n=2
        )
    )
    if len(lines) > _DIFF_LINES:
        lines = [*lines[:_DIFF_LINES], f"... {len(lines) - _DIFF_LINES} lines more"]
    for name, before, now in (
        ("error", expected.error, received.error),
        ("finished", expected.finished, received.finished),
    ):
        if before != now:
            lines += [f"-[{name}: {before}]", f"+[{name}: {now}]"]
    return lines
