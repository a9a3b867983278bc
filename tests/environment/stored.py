"""Stored trajectories of scripted agents, optionally with context summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from etude.agent import SessionLimits, SummaryPolicy, core_registry
from etude.agent.endpoint_messages import byte_tokenizer
from etude.config import RewardConfig
from etude.environment.episodes import Environment, EpisodeLimits
from etude.records import SamplingParams, Task, ToolCall, Trajectory, TrajectoryId
from etude.store.blobs import MemoryBlobs
from etude.tokens import Renderer
from etude.tokens.grammar import XmlGrammar
from etude_quickstart.memory_backend import MemoryBackend
from tests.fakes.scripted import ScriptedSampler

Tokens = NDArray[np.int32]
Message = Sequence[ToolCall | str]

LIMITS = SessionLimits(max_turns=12, max_tokens=2048, max_message_tokens=256)
SUMMARIES = SummaryPolicy(at_tokens=320, max_summary_tokens=64)
"""With tokens that are bytes, a context takes a few calls."""


@cache
def byte_renderer() -> Renderer:
    """The renderer of a scripted model: its tokenizer knows bytes and tags only."""
    grammar = XmlGrammar(core_registry().schemas)
    return Renderer(byte_tokenizer(grammar.control_tokens()), grammar)


def sampler_of(messages: Sequence[Message], summary: SummaryPolicy | None = None) -> ScriptedSampler:
    """Plays the messages of one session in their order; asked for a summary, it gives one."""
    remaining: Iterator[Message] = iter(messages)
    request = byte_renderer().user_message(summary.request) if summary else None
    count = 0

    def script(session_id: str, context: Tokens) -> Tokens:
        nonlocal count
        if request is not None and np.array_equal(context[-len(request) :], request):
            count += 1
            return byte_renderer().message([f"so far {count}"])
        return byte_renderer().message(next(remaining))

    return ScriptedSampler(script)


def record(
    task: Task,
    messages: Sequence[Message],
    identity: TrajectoryId | None = None,
    summary: SummaryPolicy | None = None,
    limits: SessionLimits = LIMITS,
    training: bool = True,
) -> Trajectory:
    """One episode on a sandbox in memory."""
    environment = Environment(
        MemoryBackend(),
        byte_renderer(),
        EpisodeLimits(limits, summary),
        RewardConfig(),
        MemoryBlobs().put,
    )
    name = identity or TrajectoryId("run", task.id, 0, 0, 0)
    sampler = sampler_of(messages, summary)
    return asyncio.run(environment.run(task, name, sampler, (7, 1), SamplingParams(), training))
