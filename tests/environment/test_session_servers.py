"""MCP servers of environment sessions: in the sandbox among the agent's files, and outside of it."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from etude.agent import SessionLimits, agent_registry, open_renderer
from etude.config import AgentConfig, McpConfig, RewardConfig
from etude.controller.agent.models import describe_unknown
from etude.environment.episodes import Environment, EpisodeLimits
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.errors import ConfigError, InfrastructureError
from etude.records import SamplingParams, Status, Task, ToolCall, ToolErrorClass, TrajectoryId
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import TASK as GRADED
from tests.fakes.scripted import ScriptedSampler, play
from tests.sandbox.backends import with_backend
from tests.tokens.chat_models import plain_chatml

PROGRAM = Path(__file__).parents[1] / "fakes" / "mcp_server.py"
INSIDE = {"lines": McpConfig(command="python3 tools/server.py", trusted=True)}
OUTSIDE = {"lines": McpConfig(command=shlex.join([sys.executable, str(PROGRAM)]), where="host")}
TASK = Task("t", "count", {"tools/server.py": PROGRAM.read_text(), "a.txt": "one\ntwo\n"})


def count(path: str) -> ToolCall:
    return ToolCall("lines_count_lines", {"path": path})


def in_sandbox(use: Callable[[SandboxBackend, dict[str, McpConfig]], Awaitable[Any]]) -> Any:
    """Runs it with real sandboxes, and with what a server in one of them has said that it offers."""

    async def run(backend: SandboxBackend) -> Any:
        sandbox = await backend.create(Template(TASK.files))
        return await use(backend, await describe_unknown(INSIDE, sandbox))

    return with_backend("local", run)


def begin(backend: SandboxBackend, servers: dict[str, McpConfig]) -> EnvironmentSession:
    registry = agent_registry(AgentConfig(mcp=servers))
    return EnvironmentSession.begin(
        SessionServices(backend, Grader(backend), registry, servers=servers), TASK
    )


async def turn(session: EnvironmentSession, *calls: ToolCall) -> list[tuple[str, ToolErrorClass | None]]:
    results = await session.run_calls(calls, {}, lambda *_: None, lambda *_: None)
    return [(result.output, result.error) for result in results]


def test_a_server_in_the_sandbox_sees_what_the_agent_did_and_is_the_agents_to_end() -> None:
    async def use(backend: SandboxBackend, servers: dict[str, McpConfig]) -> Any:
        session = begin(backend, servers)
        write = ToolCall("write_file", {"path": "a.txt", "text": "one\ntwo\nthree\n"})
        seen = [
            await turn(session, count("a.txt")),
            await turn(session, write),
            await turn(session, count("a.txt")),
        ]
        (fork,) = await session.fork()
        assert isinstance(fork, EnvironmentSession)
        seen += [await turn(session, count("die"), count("a.txt")), await turn(fork, count("a.txt"))]
        await fork.close()
        await session.close()
        return seen

    first, _, second, ended, forked = in_sandbox(use)
    assert first == [("2 lines", None)] and second == forked == [("3 lines", None)]
    assert all(error is ToolErrorClass.UNEXPECTED_ENVIRONMENT for _, error in ended), ended
    assert "the MCP server lines failed" in ended[0][0]


@pytest.mark.parametrize("flood", ["endless", "many"])
def test_a_server_in_the_sandbox_that_floods_us_is_ended(flood: str) -> None:
    async def use(backend: SandboxBackend, servers: dict[str, McpConfig]) -> Any:
        session = begin(backend, servers)
        async with asyncio.timeout(30):
            ended = await turn(session, count(flood), count("a.txt"))
        await session.close()
        return ended

    ended = in_sandbox(use)
    assert all(error is ToolErrorClass.UNEXPECTED_ENVIRONMENT for _, error in ended), ended
    assert "the MCP server lines failed" in ended[0][0]


def test_a_server_that_does_not_start_or_offers_other_tools_fails_the_session() -> None:
    async def use(backend: SandboxBackend, servers: dict[str, McpConfig]) -> Any:
        other = servers["lines"].model_copy(update={"described": "[]"})
        broken = servers["lines"].model_copy(update={"command": "python3 tools/server.py a.key"})
        for config, words in ((other, "offers other tools"), (broken, "its error output: cannot read a.key")):
            session = begin(backend, servers)
            session = EnvironmentSession.begin(
                SessionServices(backend, Grader(backend), session.services.tools, servers={"lines": config}),
                TASK,
            )
            with pytest.raises(InfrastructureError, match=words):
                await turn(session, count("a.txt"))
            await session.close()

    in_sandbox(use)


def test_a_server_outside_that_ends_is_infrastructure_and_never_a_reward() -> None:
    async def run() -> Any:
        agent = AgentConfig(tools="finish", mcp=await describe_unknown(OUTSIDE))
        renderer = open_renderer(plain_chatml(), agent)
        limits = EpisodeLimits(SessionLimits(max_tokens=20_000, max_message_tokens=2000))
        environment = Environment(MemoryBackend(), renderer, limits, RewardConfig(), None, agent=agent)

        async def played(*calls: ToolCall) -> Any:
            messages = [renderer.message([call]) for call in calls]
            identity = TrajectoryId("run", "t", 0, 0, 0)
            sampler = ScriptedSampler(play(messages))
            return await environment.run(GRADED, identity, sampler, (1,), SamplingParams())

        answered = await played(count(str(PROGRAM)), ToolCall("finish"))
        return answered, await played(*[count("die")] * limits.max_attempts)

    answered, ended = asyncio.run(run())
    assert answered.turns[0].results[0].output == f"{len(PROGRAM.read_text().splitlines())} lines"
    assert ended.status is Status.INFRASTRUCTURE and ended.reward is None
    assert "the MCP server failed" in ended.cause


def test_a_server_that_needs_a_sandbox_or_a_variable_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="no sandbox to start it"):
        asyncio.run(describe_unknown(INSIDE))
    missing = {"lines": OUTSIDE["lines"].model_copy(update={"env": {"KEY": "env:ETUDE_NO_SUCH"}})}
    with pytest.raises(ConfigError, match="variable is not set"):
        asyncio.run(describe_unknown(missing))
    with pytest.raises(ConfigError, match="its tools are unknown"):
        agent_registry(AgentConfig(mcp=INSIDE))
