"""Opens models that run in this process: of a run, or of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from etude.agent import SessionLimits, open_renderer, registry_of
from etude.agent.prompts import interactive_system
from etude.config import SEARCHING, AgentConfig
from etude.controller.agent.models import (
    ModelChoice,
    Policy,
    people_session_limits,
    people_tool_limits,
)
from etude.controller.compute import choose_kernels
from etude.controller.engines import serve_model
from etude.controller.evaluate import load_own, load_policy
from etude.controller.parts import open_service
from etude.environment.episodes import EpisodeLimits
from etude.errors import ConfigError
from etude.inference import Engine, EngineService
from etude.observe import RunDirectory
from etude.observe.machine import available_cores
from etude.records import SamplingParams
from etude.tokens import Piece, Renderer
from etude.weights import MemoryWeights

_TURNS = 200
"""Least limit of turns in a conversation, for models that were trained with fewer in one session."""
_PREFILL_TOKENS = 2048
_NUM_SESSIONS = 2


@contextlib.asynccontextmanager
async def open_run(choice: ModelChoice, one_shot: bool) -> AsyncIterator[Policy]:
    """Opens the trained model of a run, with the tools and limits that it was trained with."""
    run = RunDirectory.open(Path(choice.run))
    config = run.config
    if choice.index and (choice.index in SEARCHING) != (config.agent.index in SEARCHING):
        raise ConfigError(
            f"would change the tools: the run's model was trained with index {config.agent.index!r}",
            field="--index",
            received=choice.index,
            fix="leave it out",
        )
    tokenizer, model = load_policy(run, None)
    limits = EpisodeLimits.from_config(config)
    session = (
        limits.session
        if one_shot
        else replace(limits.session, max_turns=max(limits.session.max_turns, _TURNS))
    )
    renderer = open_renderer(tokenizer, config.agent)
    async with open_service(config, tokenizer, model, deterministic=False) as (weights, service):
        await serve_model(weights, service, model, config.name)
        yield Policy(
            label=f"run {run.path.name}",
            sampler=service,
            renderer=renderer,
            registry=registry_of(renderer.grammar.tools, config.agent.mcp),
            index=choice.index or ("grep" if config.agent.index == "none" else config.agent.index),
            servers=config.agent.mcp,
            limits=session,
            params=SamplingParams(temperature=choice.temperature or 0.0),
            tool_limits=limits.tools,
            summary=None if limits.summary is None else replace(limits.summary, jitter=0.0),
            seed=config.seed,
        )


@contextlib.asynccontextmanager
async def open_model(choice: ModelChoice, agent: AgentConfig) -> AsyncIterator[Policy]:
    """Opens the model of a Hugging Face directory or a run. Raises CheckpointError, ConfigError."""
    directory = Path(choice.to_dict()["model"])
    tokenizer, model = load_own(directory, "model")
    renderer = open_renderer(tokenizer, agent)

    def system_with(words: str) -> tuple[Piece, ...] | None:
        if renderer.system is None:  # it was trained without one
            return None
        return open_renderer(
            tokenizer, agent.model_copy(update={"system": interactive_system(agent) + words})
        ).system

    limits = _limits(directory, model.config.max_positions, renderer)
    name, weights = directory.name, MemoryWeights()
    engine = Engine(
        model.config,
        model.vocab_size,
        _NUM_SESSIONS,
        limits.max_tokens + 1,
        _PREFILL_TOKENS,
        choose_kernels("auto"),
        available_cores(),
    )
    async with EngineService(engine, weights.fetch, None) as service:
        await serve_model(weights, service, model, name)
        yield Policy(
            label=f"model {name}",
            sampler=service,
            renderer=renderer,
            registry=registry_of(renderer.grammar.tools, agent.mcp),
            limits=limits,
            params=SamplingParams(temperature=choice.temperature or 0.0, max_tokens=limits.max_tokens),
            tool_limits=people_tool_limits(),
            system_with=system_with,
            index=agent.index,
            servers=agent.mcp,
        )


def _limits(directory: Path, max_positions: int, renderer: Renderer) -> SessionLimits:
    """Limits with the model's whole context, up to what is useful on one machine."""
    limits, _ = people_session_limits(min(max_positions, 32_768))
    used = len(renderer.prompt(""))
    if used >= limits.max_tokens // 2:
        raise ConfigError(
            "the tools' descriptions fill half of the model's context",
            field=str(directory),
            received=f"{used} of {limits.max_tokens} tokens",
            fix="offer fewer tools, such as --tools core",
        )
    return limits
