"""An environment with simulated sandboxes that only take time; agent, tokens and limits are real."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from benchmarks.simulation.rollout.sessions import SessionShape, SessionShapes
from numpy.typing import NDArray

from etude.agent import AgentSession, SessionLimits, run_session
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.runners import EpisodeRequest, EpisodeRunner
from etude.protocols import OnCall, OnResult, Sampler
from etude.records import RewardBreakdown, ToolCall, ToolResult
from etude.tokens.renderer import Renderer

LOOK = ToolCall("read_file", {"path": "a.py"})
FINISH = ToolCall("finish")

_LENGTH_STEP = 1.1
"""Message lengths are rounded to powers of this factor, so that few messages are rendered."""


class SimulatedEnvironment(EpisodeRunner):
    """Replaces an Environment: episodes whose turns and durations are drawn from SessionShapes.

    Each turn but the last calls one tool. `message` is the source of a SimulatedEngine's messages.
    """

    def __init__(self, shapes: SessionShapes, renderer: Renderer) -> None:
        self.num_turns = 0
        """Turns ended, in all sessions."""
        self.num_ended = 0
        """Sessions ended."""
        self.most_running = 0
        """Peak number of concurrent sessions."""
        self._shapes = shapes
        self._renderer = renderer
        self._limits = SessionLimits(
            max_turns=10 * shapes.most_turns, max_tokens=1 << 20, max_message_tokens=1 << 16
        )
        self._drawn: dict[str, SessionShape] = {}
        """Session id -> shape, of the running sessions."""
        self._rendered: dict[tuple[int, bool], NDArray[np.int32]] = {}

    def message(self, session_id: str, number: int) -> NDArray[np.int32]:
        """Tokens of a session's message with this number. See SimulatedEngine."""
        lengths = self._drawn[session_id].message_tokens
        return self._render(lengths[number], number + 1 == len(lengths))

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        """See EpisodeRunner.play. There are no infrastructure failures."""
        task, identity = request.task, request.identity
        shape = self._shapes.draw(task, identity.group, identity.index)
        session_id = f"{identity}~0"
        longest = max(len(self._render(length, True)) for length in shape.message_tokens)
        params = replace(request.params, max_tokens=max(request.params.max_tokens, longest))
        session = AgentSession(task.instruction, self._renderer, identity, self._limits, params)
        self._drawn[session_id] = shape
        self.most_running = max(self.most_running, len(self._drawn))
        try:
            await run_session(session, sampler, _Tools(shape.tool_s), session_id, request.rng_key)
            await asyncio.sleep(shape.grade_s)
        finally:
            del self._drawn[session_id]
        self.num_turns += len(session.turns)
        self.num_ended += 1
        return ForkedEpisode(session.trajectory(reward=RewardBreakdown(float(shape.passes))))

    def _render(self, num_tokens: int, is_last: bool) -> NDArray[np.int32]:
        """A message of about `num_tokens` tokens, reasoning first."""
        power = round(np.log(max(1, num_tokens)) / np.log(_LENGTH_STEP))
        known = self._rendered.get((power, is_last))
        if known is None:
            call = FINISH if is_last else LOOK
            bare = len(self._renderer.message((call,)))
            thoughts = "a" * max(0, round(_LENGTH_STEP**power) - bare)
            known = self._renderer.message((thoughts, call) if thoughts else (call,))
            self._rendered[power, is_last] = known
        return known


class _Tools:
    """Implements Workspace: a turn's tools take the drawn time and return little output."""

    def __init__(self, tool_s: Sequence[float]) -> None:
        self._times = iter(tool_s)

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        """See Workspace.run_calls."""
        if FINISH in calls:
            return [ToolResult("", finished=True) for _ in calls]
        await asyncio.sleep(next(self._times))
        return [ToolResult("1\treturn") for _ in calls]

    async def archive(self, path: str, text: str) -> str:
        """See Workspace.archive."""
        return ""
