"""Who plays a run's sessions: Étude's own agent, or a foreign one against an endpoint of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from etude.agent import agent_format, open_renderer
from etude.config import HarnessConfig, RunConfig
from etude.controller.backends import open_run_backend
from etude.environment.episodes import Environment, EpisodeLimits, RouteKeeper
from etude.environment.runners import TimedRunner
from etude.errors import ConfigError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.host_view import HostView
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.network.environment import OWN_URL
from etude.tokens.tokenizer import Tokenizer


@contextlib.asynccontextmanager
async def open_environment(
    config: RunConfig,
    backend: SandboxBackend,
    tokenizer: Tokenizer,
    limits: EpisodeLimits,
    keep_routes: RouteKeeper,
) -> AsyncIterator[TimedRunner]:
    """What runs the episodes of a run in this process. Raises ConfigError as `check_harness`."""
    renderer, reward = open_renderer(tokenizer, config.agent), config.rl.reward
    harness = config.agent.harness
    if not harness.command:
        yield Environment(backend, renderer, limits, reward, keep_routes)
        return
    # FastAPI comes with them, which other runs do without.
    from etude.environment.harness import Doorway, HarnessEnvironment
    from etude.environment.recording import LiveSessions, MapLimits, RecordingLimits
    from etude.environment.recording.server import build_app
    from etude.serving.process import served

    machines = _prepared(harness, backend)
    held = MapLimits(limits.session.max_tokens)
    if limits.session.max_session_tokens:
        held = replace(held, max_session_tokens=limits.session.max_session_tokens)
    shelf = agent_format(tokenizer, config.agent).shelf()
    sessions = LiveSessions(shelf, RecordingLimits(session=held))
    async with served(build_app(sessions)) as url:
        doorway = Doorway(url)
        if machines.capabilities().network:
            machines.own_server = urlsplit(url).netloc
            doorway = Doorway(OWN_URL, (machines.own_server,))
        yield HarnessEnvironment(backend, renderer, limits, reward, keep_routes, harness, sessions, doorway)


def check_harness(config: RunConfig) -> None:
    """Raises ConfigError, before a run has a directory, for sandboxes in which no command runs or that cannot
    reach the endpoint, and for an environment that they cannot be shown."""
    if config.agent.harness.command:
        backend = open_run_backend(config.sandbox)
        try:
            _prepared(config.agent.harness, backend)
        finally:
            asyncio.run(backend.close())


def _prepared(harness: HarnessConfig, backend: SandboxBackend) -> MachineBackend:
    """The backend, whose sandboxes see the environment with the agent."""
    if not isinstance(backend, MachineBackend) or not backend.capabilities().commands:
        raise ConfigError(
            "a foreign agent cannot be run in sandboxes of this kind",
            field="sandbox.backend",
            received=backend.capabilities().backend,
            fix="local, gvisor, vm, docker or podman",
        )
    if harness.python:
        assert isinstance(backend, LocalBackend), "so RunConfig wants it"
        view = HostView()
        try:
            view.add_python(Path(harness.python).absolute())
        except ConfigError as error:
            raise ConfigError(
                error.message,
                field="agent.harness.python",
                received=harness.python,
                fix="name one made with `python -m venv DIR`, not below /tmp, that other users may read",
            ) from error
        view.programs = ""  # for the command alone: tests find the Python that they find without it
        backend.view = view
    return backend
