"""Plays sessions of scripted authors in place of a sampler, token for token as in a rollout."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from etude.agent import (
    AgentSession,
    LocalWorkspace,
    SessionLimits,
    SummaryPolicy,
    ToolContext,
    agent_registry,
)
from etude.agent.index.templates import TemplateIndexes
from etude.config import AgentConfig
from etude.protocols import Archive, Finished, RunCalls
from etude.records import PolicyVersion, SampleChunk, Task, ToolCall, ToolResult, TrajectoryId
from etude.sandbox.template import Template
from etude.tokens.renderer import Renderer
from etude_quickstart.memory_backend import MemoryBackend

Parts = tuple[ToolCall | str, ...]
"""One message: calls and raw text."""

Chunk = TypeVar("Chunk")
Played = TypeVar("Played")

_VERSION = PolicyVersion("scripted", 0)
_PR_SET_PDEATHSIG = 1


class Author(Protocol):
    """A scripted author: writes the messages of one session."""

    def message(self, results: Sequence[ToolResult] | None) -> Sequence[ToolCall | str]:
        """The next message, given the results of the last one's calls; None if they were passed before."""
        ...


@runtime_checkable
class SummaryAuthor(Author, Protocol):
    """An author that also writes context summaries."""

    def summary(self, results: Sequence[ToolResult] | None) -> str:
        """The summary of a full context. `results`: as for `message`."""
        ...


async def play(
    task: Task,
    author: Author,
    renderer: Renderer,
    limits: SessionLimits,
    summary: SummaryPolicy | None = None,
    *,
    agent: AgentConfig | None = None,
    indexes: TemplateIndexes | None = None,
) -> tuple[AgentSession, list[Parts]]:
    """Plays one session of the author on an in-memory sandbox, with the tools of `agent` (by default the core
    ones) and the index, if given: (session, its messages without summaries)."""
    template = Template(task.files, task.id)
    sandbox = await MemoryBackend().create(template)
    search = None if indexes is None else indexes.search(template, sandbox)
    tools = agent_registry(agent or AgentConfig(), "core")
    workspace = LocalWorkspace(ToolContext(sandbox, tools, task.test_paths, search=search))
    identity = TrajectoryId("scripted", task.id, 0, 0, 0)
    session = AgentSession(task.instruction, renderer, identity, limits, summary=summary)
    results: list[ToolResult] | None = None
    messages: list[Parts] = []
    while not isinstance(action := session.next_action(), Finished):
        match action:
            case RunCalls(calls):
                results = await workspace.run_calls(calls, {}, _ignore, _ignore)
                session.on_results(results)
            case Archive(path, text):
                session.on_archived(await workspace.archive(path, text))
            case _:
                if action.summarising:
                    assert isinstance(author, SummaryAuthor), "this author writes no summaries"
                    parts: Parts = (author.summary(results),)
                else:
                    parts = tuple(author.message(results))
                    messages.append(parts)
                results = None
                tokens = renderer.message(parts)
                logprobs = np.zeros(len(tokens), dtype=np.float32)
                session.on_chunk(SampleChunk(tokens, logprobs, _VERSION, _VERSION, finish="stop"))
    if search is not None:
        search.close()
    return session, messages


def play_in_processes(
    play_chunk: Callable[[Chunk], Played], chunks: Iterable[Chunk], num_processes: int
) -> list[Played]:
    """Maps `play_chunk` over the chunks in worker processes, in order. Only this process reacts to signals
    that stop a run; pending chunks are then cancelled."""
    with ProcessPoolExecutor(num_processes, initializer=_ignore_stopping) as pool:
        try:
            return list(pool.map(play_chunk, chunks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ignore_stopping() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it still ends with its parent
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _ignore(*event: object) -> None:
    pass
