"""A conversation over the in-memory sandbox and a scripted model, for the tests of the agent for people."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from etude.agent import Registry, ToolLimits, registry_named
from etude.agent.endpoint_messages import byte_tokenizer
from etude.controller.agent.conversation import Conversation, Frontend, open_conversation
from etude.controller.agent.events import AgentEvent
from etude.controller.agent.folders import SessionFolder
from etude.controller.agent.models import Policy, people_session_limits
from etude.controller.agent.trees import DirectoryTree
from etude.protocols import Sampler
from etude.records import SamplingParams, ToolCall
from etude.sandbox.interface import SandboxBackend
from etude.tokens import Renderer
from etude.tokens.grammar import XmlGrammar
from etude_quickstart.memory_backend import MemoryBackend
from tests.fakes.scripted import ScriptedSampler, play

TALLY = "def tally(xs, a):\n    total = 1\n    for x in xs:\n        total += x\n    return total\n"
MENDED = TALLY.replace("= 1", "= 0")
READ = ToolCall("read_file", {"path": "lib/tally.py"})
MEND = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "2", "text": "    total = 0"})
MAKE = ToolCall("write_file", {"path": "new/made.py", "text": "made\n"})
DELETE = ToolCall("delete_file", {"path": "gone.py"})
FINISH = ToolCall("finish")


def make_repository(path: Path) -> Path:
    """A small directory to work on."""
    (path / "lib").mkdir(parents=True)
    (path / "lib" / "tally.py").write_text(TALLY)
    (path / "gone.py").write_text("gone\n")
    return path


def registry() -> Registry:
    return registry_named("full")


def renderer() -> Renderer:
    grammar = XmlGrammar(registry().schemas)
    return Renderer(byte_tokenizer(grammar.control_tokens()), grammar)


def make_policy(turns: list[list[Any]], sampler: Sampler | None = None) -> Policy:
    """A model that plays these messages."""
    rendered, (limits, _) = renderer(), people_session_limits(200_000)
    messages = [rendered.message(parts) for parts in turns]
    return Policy(
        label="script",
        sampler=sampler or ScriptedSampler(play(messages)),
        renderer=rendered,
        registry=registry(),
        limits=limits,
        params=SamplingParams(max_tokens=limits.max_tokens),
        tool_limits=ToolLimits(),
        sampler_for=None
        if sampler
        else lambda _, count: ScriptedSampler(play(messages[count:]), chunk_tokens=5),
    )


@contextlib.asynccontextmanager
async def conversing(
    root: Path,
    turns: list[list[Any]],
    mode: str = "full",
    *,
    resume: str | None = None,
    events: list[AgentEvent] | None = None,
    backend: SandboxBackend | None = None,
    sampler: Sampler | None = None,
    ask: Any = None,
) -> AsyncIterator[Conversation]:
    """A conversation about `root / "repo"`, whose session lies in `root / "sessions"`."""
    tree, sessions = DirectoryTree(root / "repo"), root / "sessions"
    folder = (
        SessionFolder.open(sessions, resume)
        if resume
        else SessionFolder.create(sessions, tree.root, {}, mode)
    )
    emit = events.append if events is not None else lambda event: None
    policy = make_policy(turns, sampler)
    face = Frontend(emit, ask)
    async with open_conversation(
        folder, tree, policy, backend or MemoryBackend(), face, mode
    ) as conversation:
        yield conversation


def run(coroutine: Any) -> Any:
    """Runs a test's coroutine, a minute at most."""

    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())
