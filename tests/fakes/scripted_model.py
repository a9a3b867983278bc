"""A fake model that plays messages from a JSON file.

Importing this module makes `etude agent` accept `--model FILE.json` and `--run FILE.json`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.agent import agent_registry
from etude.agent.endpoint_messages import byte_tokenizer
from etude.config import AgentConfig
from etude.controller.agent import models
from etude.protocols import Sampler
from etude.records import SamplingParams, ToolCall
from etude.tokens import Renderer
from etude.tokens.grammar import ParseEvent, XmlGrammar
from tests.fakes.scripted import ScriptedSampler, play

PROGRAM = "import tests.fakes.scripted_model; from etude.cli import main; main()"
"""Runs etude's command line with scripted models; for `python -c` in the root of the repository."""
_open_real_model = models.open_model_of


def write_script(path: Path, messages: Sequence[Sequence[str | ToolCall | Mapping[str, Any]]]) -> str:
    """Writes a script of messages (text and calls); returns its path, the model's name."""
    path.write_text(
        json.dumps(messages, default=lambda call: {"name": call.name, "arguments": call.arguments})
    )
    return str(path)


def read_script(path: Path) -> list[list[ToolCall | str]]:
    """Reads a script: messages whose parts are text or `{"name": ..., "arguments": {...}}`."""
    return [
        [
            part if isinstance(part, str) else ToolCall(part["name"], part.get("arguments", {}))
            for part in message
        ]
        for message in json.loads(path.read_text(encoding="utf-8"))
    ]


def open_model_of(
    choice: models.ModelChoice, one_shot: bool, agent: AgentConfig
) -> contextlib.AbstractAsyncContextManager[models.Policy]:
    """Opens the script if a JSON file is named, else the real model."""
    script = Path(choice.model or choice.run)
    return _scripted(script, agent) if script.suffix == ".json" else _open_real_model(choice, one_shot, agent)


@contextlib.asynccontextmanager
async def _scripted(script: Path, agent: AgentConfig) -> AsyncIterator[models.Policy]:
    registry = agent_registry(agent, "core")
    grammar = XmlGrammar(registry.schemas)
    renderer = Renderer(byte_tokenizer(grammar.control_tokens()), grammar)
    messages = [renderer.message(parts) for parts in read_script(script)]
    limits, _ = models.people_session_limits(200_000)

    def sampler_for(on_event: Callable[[ParseEvent], None], num_messages: int) -> Sampler:
        return ScriptedSampler(play(messages[num_messages:]), chunk_tokens=7)

    yield models.Policy(
        label=f"script {script.name}",
        sampler=ScriptedSampler(play(messages)),
        renderer=renderer,
        registry=registry,
        limits=limits,
        params=SamplingParams(max_tokens=limits.max_tokens),
        tool_limits=models.people_tool_limits(),
        index=agent.index,
        servers=agent.mcp,
        sampler_for=sampler_for,
    )


models.open_model_of = open_model_of
