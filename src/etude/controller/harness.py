"""Opens a run's environment: for Étude's own agent, or for a foreign one with a sampling endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from etude.agent import agent_format, open_renderer
from etude.agent.recording import KeepRoutes
from etude.config import HarnessConfig, RunConfig
from etude.environment.episodes import Environment, EpisodeLimits
from etude.environment.runners import TimedEpisodeRunner
from etude.errors import ConfigError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.host_view import HostView
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.network.proxy import OWN_URL
from etude.tokens.tokenizer import Tokenizer

_BODY_BYTES, _BYTES_PER_TOKEN = 4 << 20, 64
"""Limit of an agent's request: a whole context, as JSON escapes it, and a margin for the rest."""
_REQUESTS = 8
"""Limit of concurrent requests of one session."""


@contextlib.asynccontextmanager
async def open_environment(
    config: RunConfig,
    backend: SandboxBackend,
    tokenizer: Tokenizer,
    limits: EpisodeLimits,
    keep_routes: KeepRoutes,
) -> AsyncIterator[TimedEpisodeRunner]:
    """Opens a run's player in this process, for a foreign agent with its endpoint; closes it and the backend
    at exit. Raises as `check_harness`."""
    harness, reward = config.agent.harness, config.rl.reward
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        if not harness.command:
            environment = Environment.of_run(config, tokenizer, backend, limits, keep_routes)
            stack.push_async_callback(environment.close)
            yield environment
            return
        # They import FastAPI, which other runs do not need.
        from etude.environment.harness import HarnessEnvironment
        from etude.environment.recording import LiveSessions, MapLimits, RecordingLimits
        from etude.environment.recording.server import build_app
        from etude.serving.process import served

        assert isinstance(backend, MachineBackend), "so RunConfig wants it"
        _show_directory(harness, backend)
        map_limits = MapLimits(limits.session.max_tokens)
        if limits.session.max_session_tokens:
            map_limits = replace(map_limits, max_session_tokens=limits.session.max_session_tokens)
        renderer = open_renderer(tokenizer, config.agent)
        renderers = agent_format(tokenizer, config.agent).renderers()
        body_bytes = _BODY_BYTES + map_limits.max_context_tokens * _BYTES_PER_TOKEN
        allowed = RecordingLimits(body_bytes, requests_per_session=_REQUESTS, session=map_limits)
        sessions = LiveSessions(renderers, allowed)
        url, reach = await stack.enter_async_context(served(build_app(sessions))), tuple[str, ...]()
        if backend.capabilities().network:
            backend.own_server = urlsplit(url).netloc
            stack.callback(setattr, backend, "own_server", "")
            url, reach = OWN_URL, (backend.own_server,)
        yield HarnessEnvironment(
            backend, renderer, limits, reward, keep_routes, harness, sessions, url, reach
        )


def check_harness(config: RunConfig) -> None:
    """Raises ConfigError, before a run has a directory, for a directory that its sandboxes cannot see."""
    if config.agent.harness.command:
        _show_directory(config.agent.harness, LocalBackend())


def _show_directory(harness: HarnessConfig, backend: SandboxBackend) -> None:
    """Makes the agent's directory, if one is named, visible to sandboxes. Raises ConfigError."""
    if not harness.directory:
        return
    assert isinstance(backend, LocalBackend), "so RunConfig wants it"
    view = HostView()
    try:
        place = Path(harness.directory).absolute()
        if (place / "bin" / "python").exists():
            view.add_python(place)
        else:
            view.add_directory(place)
    except ConfigError as error:
        raise ConfigError(
            error.message,
            field="agent.harness.directory",
            received=harness.directory,
            fix="name one outside of /tmp that holds nothing but the agent and is readable by all users",
        ) from error
    view.programs = ""  # the command has full paths; tests must find the same Python as without the agent
    backend.view = view
