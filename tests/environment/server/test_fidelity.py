"""One scripted session in the terminal, in a rollout and in the cloud: byte-equal tokens in every context."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from etude.agent import (
    AgentSession,
    LocalWorkspace,
    SessionLimits,
    SummaryPolicy,
    ToolContext,
    ToolLimits,
    core_registry,
    run_session,
)
from etude.environment.origins import task_template
from etude.protocols import Workspace
from etude.records import Status, Task, ToolCall, TrajectoryId
from etude.sandbox.interface import SandboxBackend
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import FINISH, MEND, READ, TASK, TEST, renderer
from tests.environment.server.serving import begin, new_host, new_services, remote
from tests.fakes.scripted import ScriptedSampler, play
from tests.sandbox.backends import with_backend

LONG = replace(
    TASK,
    files={
        **TASK.files,
        "data.txt": "".join(f"line {n} {'x' * 300}\n" for n in range(400)),
        "ü ñ.txt": "ß\r\n",
    },
)
SCRIPT: list[list[Any]] = [
    ["I look. <read_file><path>lib/tally.py", ToolCall("list_dir")],
    [READ, ToolCall("grep", {"pattern": "def "}), ToolCall("read_file", {"path": "ü ñ.txt"})],
    [ToolCall("read_file", {"path": "data.txt"}), ToolCall("read_file", {"path": "absent"})],
    ["lib/tally.py is wrong by one; what is left is to mend it."],
    [MEND, TEST],
    [ToolCall("read_file", {"path": ".etude/history/001.md", "limit": "5"})],
    [FINISH],
]
COMMANDS: list[list[Any]] = [
    [ToolCall("run_command", {"command": "seq 3000; echo done >&2; exit 3"})],
    [ToolCall("run_command", {"command": "cat .etude/outputs/* | tail -n 2; pwd"}), READ],
]
RunIt = Callable[[SandboxBackend, Task, Callable[[Workspace], Awaitable[None]]], Awaitable[None]]


async def terminal(backend: SandboxBackend, task: Task, work: Any) -> None:
    sandbox = await backend.create(task_template(task))
    await work(LocalWorkspace(ToolContext(sandbox, core_registry(), task.test_paths, ToolLimits())))
    await sandbox.kill()


async def rollout(backend: SandboxBackend, task: Task, work: Any) -> None:
    session = begin(new_services(backend), task)
    await work(session)
    assert (await session.submit()).verdict.passed
    await session.close()


async def cloud(backend: SandboxBackend, task: Task, work: Any) -> None:
    async with remote(new_host(new_services(Unclosed(backend)))) as server:
        session = await server.create(task)
        await work(session)
        assert (await session.submit()).verdict.passed
        await session.close()


class Unclosed:
    """A backend that outlives the server."""

    def __init__(self, inner: SandboxBackend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def close(self) -> None:
        """Stays open."""


async def played(run: RunIt, backend: SandboxBackend, script: list[list[Any]]) -> AgentSession:
    """The scripted session, run to its end."""
    session = AgentSession(
        "test_tally fails",
        renderer(),
        TrajectoryId("run", "tally", 0, 0, 0),
        SessionLimits(max_turns=20, max_tokens=80_000, max_message_tokens=2000),
        summary=SummaryPolicy(at_tokens=20_000, max_summary_tokens=400),
    )
    sampler = ScriptedSampler(play([renderer().message(parts) for parts in script]))

    async def work(workspace: Workspace) -> None:
        await run_session(session, sampler, workspace, "s", (7,))

    await run(backend, LONG, work)
    return session


def check(sessions: list[AgentSession]) -> None:
    first = sessions[0]
    assert first.status is Status.DONE
    assert len(first.contexts) == 2, [context.recording.length for context in first.contexts]
    assert first.facts.malformed >= 1
    assert first.facts.parallel_turns >= 2
    assert first.facts.last_tests_green
    for other in sessions[1:]:
        assert len(other.contexts) == len(first.contexts)
        for mine, theirs in zip(first.segments(), other.segments(), strict=True):
            assert mine.tokens.tobytes() == theirs.tokens.tobytes()
            assert mine.sampled.tobytes() == theirs.sampled.tobytes()
        assert other.facts.to_dict() == first.facts.to_dict()
        assert [turn.calls for turn in other.turns] == [turn.calls for turn in first.turns]
        assert [[r.output for r in t.results] for t in other.turns] == [
            [r.output for r in t.results] for t in first.turns
        ]


def test_terminal_rollout_and_cloud_give_the_same_tokens() -> None:
    async def scenario() -> list[AgentSession]:
        return [await played(run, MemoryBackend(), SCRIPT) for run in (terminal, rollout, cloud)]

    check(asyncio.run(scenario()))


def test_the_same_in_real_sandboxes_with_commands() -> None:
    script = [*SCRIPT[:2], *COMMANDS, *SCRIPT[2:]]

    async def scenario(backend: SandboxBackend) -> list[AgentSession]:
        return [await played(run, backend, script) for run in (terminal, rollout, cloud)]

    check(with_backend("local", scenario))
