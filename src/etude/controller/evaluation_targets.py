"""Targets of an evaluation: a run, a checkpoint, or a model behind an endpoint, opened for sessions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.agent.endpoint import Endpoint, check_endpoint
from etude.agent.tools import registry_named
from etude.config import RunConfig, load_config, read_toml
from etude.controller.agent.models import BYTES_PER_TOKEN, ModelChoice, open_model_of
from etude.controller.backends import open_run_backend
from etude.controller.compute import resolve_evaluation, use_sampling_threads
from etude.controller.engines import serve_model
from etude.controller.evaluate import find_checkpoint, load_policy
from etude.controller.parts import open_parts
from etude.environment.episodes import Environment, EpisodeLimits
from etude.environment.runners import EpisodeRunner
from etude.errors import ConfigError
from etude.observe import RunDirectory
from etude.protocols import Sampler
from etude.records import SamplingParams
from etude.sandbox.types import Resources

SECTIONS = ("agent", "images", "sandbox", "tasks")
"""Sections of a configuration that an evaluation may override."""
_NUM_SESSIONS = 8
"""Default of concurrent sessions, for an endpoint."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Settings of a target besides its path or address; see the options of `etude eval run`."""

    checkpoint: str | None = None
    """Name of a run's checkpoint."""
    model_name: str = ""
    key_variable: str = ""
    native_tools: bool = True
    context_tokens: int = 128_000
    tools: str = ""
    max_turns: int = 100
    """Limit of a session's turns, for a model that is not a run's."""
    settings: tuple[str, ...] = ()
    """Values for keys of `SECTIONS`, such as `agent.index=meaning`; override the run's, or the defaults."""
    config: Path | None = None
    """A configuration file whose `SECTIONS` override as `settings` do; its other sections are ignored."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model with all settings that determine its sessions."""

    kind: str
    """`run`, `checkpoint` or `endpoint`."""
    place: str
    """Directory or address."""
    options: TargetOptions
    config: RunConfig
    """The run's, or the defaults, with the overrides."""
    weights: tuple[str, ...] = ()
    """Names, sizes and modification times of the weight files."""

    def describe(self) -> dict[str, Any]:
        """Describes it in plain JSON values: equal descriptions mean the same model and settings."""
        options = self.options
        named = {"kind": self.kind, "place": self.place, "weights": list(self.weights)}
        label = options.model_name or Path(self.place).name
        label = " ".join((label, *options.settings))
        if options.settings:
            named["settings"] = list(options.settings)
        if options.config is not None:
            named["agent"] = self.config.agent.model_dump(mode="json")
        if self.kind == "run":
            chosen = f"/{options.checkpoint}" if options.checkpoint else ""
            return {"label": label + chosen, **named, "checkpoint": options.checkpoint}
        return {
            "label": label,
            **named,
            "tools": options.tools,
            "native_tools": options.native_tools,
            "max_turns": options.max_turns,
            "context_tokens": options.context_tokens,
        }


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """A target that is ready to play: a sampler and an environment."""

    runner: EpisodeRunner
    sampler: Sampler
    params: SamplingParams
    max_sessions: int
    units_per_token: float = 1.0
    """Units that its sessions record per token: for an endpoint they record bytes."""


def find_target(place: str, options: TargetOptions) -> Target:
    """The model at an address or in a directory. Raises ConfigError, RunDirectoryError."""
    other = [setting for setting in options.settings if setting.partition(".")[0] not in SECTIONS]
    if other:
        raise ConfigError(
            f"only the sections {', '.join(SECTIONS)} can be overridden",
            field="--set",
            received=other[0],
            fix="give keys such as agent.index",
        )
    if place.startswith(("http://", "https://")):
        check_endpoint(Endpoint(place, options.model_name, options.key_variable))
        return Target("endpoint", place, options, _default_config(options))
    path = Path(place).resolve()
    if (path / "config.toml").is_file():
        return _run_target(RunDirectory(path), options)
    if not (path / "config.json").is_file():
        raise ConfigError(
            "is neither a run, nor a checkpoint, nor an address",
            field="TARGET",
            received=place,
            fix="name a directory under runs/, a directory with a config.json, or http://host:port/v1",
        )
    for parent in path.parents:
        if (parent / "config.toml").is_file() and RunDirectory(parent).checkpoints in path.parents:
            return _run_target(RunDirectory(parent), replace(options, checkpoint=path.name))
    return Target("checkpoint", str(path), options, _default_config(options), _weights(path))


def open_target(target: Target, temperature: float | None) -> AbstractAsyncContextManager[OpenTarget]:
    """Opens a target. Raises UserError for a model that cannot be used, ResourceError where sandboxes are not
    available.

    `temperature`: sent to an endpoint; None: the endpoint's default.
    """
    return _open_run(target) if target.kind == "run" else _open_policy(target, temperature)


def _run_target(run: RunDirectory, options: TargetOptions) -> Target:
    weights = _weights(find_checkpoint(run, options.checkpoint))
    return Target("run", str(run.path), options, _load_config(run.config_file, options), weights)


def _default_config(options: TargetOptions) -> RunConfig:
    if options.tools:
        registry_named(options.tools)  # raises at once for unknown tools
    tools = [f"agent.tools={json.dumps(options.tools)}"] if options.tools else []
    return _load_config(None, replace(options, settings=(*options.settings, *tools)))


def _load_config(own: Path | None, options: TargetOptions) -> RunConfig:
    """The model's own configuration, with the sections that the options override."""
    config = load_config(own, options.settings)
    if options.config is None:
        return config
    tree, given = read_toml(options.config), load_config(options.config, options.settings)
    return config.model_copy(update={name: getattr(given, name) for name in SECTIONS if name in tree})


def _weights(directory: Path) -> tuple[str, ...]:
    files = sorted(directory.rglob("*.safetensors"))
    return tuple(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


@contextlib.asynccontextmanager
async def _open_run(target: Target) -> AsyncIterator[OpenTarget]:
    run = RunDirectory(Path(target.place))
    tokenizer, model = load_policy(run, target.options.checkpoint)
    config = resolve_evaluation(run, target.config)
    use_sampling_threads(config)
    async with open_parts(config, tokenizer, model) as parts:
        await serve_model(parts.weights, parts.service, model, config.name)
        yield OpenTarget(parts.environment, parts.service, SamplingParams(), config.engine.num_slots)


@contextlib.asynccontextmanager
async def _open_policy(target: Target, temperature: float | None) -> AsyncIterator[OpenTarget]:
    options, config, is_endpoint = target.options, target.config, target.kind == "endpoint"
    choice = ModelChoice(
        model="" if is_endpoint else target.place,
        endpoint=target.place if is_endpoint else "",
        model_name=options.model_name,
        key_variable=options.key_variable,
        native_tools=options.native_tools,
        context_tokens=options.context_tokens,
        temperature=temperature,
    )
    backend = open_run_backend(config.sandbox)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        policy = await stack.enter_async_context(open_model_of(choice, True, config.agent))
        limits = EpisodeLimits(
            replace(policy.limits, max_turns=options.max_turns),
            None if policy.summary is None else replace(policy.summary, jitter=0.0),
            policy.tool_limits,
            Resources(memory_bytes=config.sandbox.memory_bytes),
        )
        environment = Environment(
            backend,
            policy.renderer,
            limits,
            config.rl.reward,
            None,
            policy.registry,
            policy.system,
            policy.retry_policy,
            config.agent,
        )
        stack.push_async_callback(environment.close)
        units = float(BYTES_PER_TOKEN) if is_endpoint else 1.0
        num_sessions = _NUM_SESSIONS if is_endpoint else 2
        yield OpenTarget(environment, policy.sampler, policy.params, num_sessions, units)
