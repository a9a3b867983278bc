"""The state of a sandbox server: backends, sandboxes, templates, idempotency keys and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import AgentError, ConfigError, UserError
from etude.kit.leftovers import ScratchDirectory, work_directory
from etude.kit.tasks import Tasks, finish_all
from etude.sandbox.errors import CapacityError, SandboxMissingError
from etude.sandbox.fleet.hosts import Capacity
from etude.sandbox.fleet.probe import MachineProbe, machine_capacity
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.pool import PooledBackend
from etude.sandbox.refusals import missing_sandbox
from etude.sandbox.template import Template, template_key
from etude.serving.long_answers import OutputBuffer
from etude.serving.messages import Encoded
from etude.serving.metrics import Labels, Metrics

PRUNE_EVERY = 256
"""After so many new sandboxes, those that ended by themselves are removed."""
_NUM_ENDED = 4096
"""How many ended sandboxes are kept, so that calls to them raise their own error."""


@dataclass(frozen=True)
class Limits:
    """Limits of what clients may send and request. Sizes in bytes."""

    body_bytes: int = 64 << 20
    """Most of one request that is read into memory; larger files are streamed."""
    upload_bytes: int = 16 << 30
    """Most of one streamed upload or imported snapshot, which is spooled on disk."""
    template_bytes: int = 512 << 20
    """Most of all templates stored for further creations; the least recently used are dropped first."""
    num_keys: int = 4096
    """Number of keys of finished creations that are kept."""
    max_forks: int = 256
    """Most copies in one request."""
    max_timeout_s: float | None = None
    """Longest time to live; also the default of sandboxes. None: unlimited."""
    unclaimed_s: float = 60.0
    """How long a sandbox lives whose creator disconnected before it was ready and did not retry."""

    def bound_life(self, timeout_s: float | None) -> float | None:
        """The time to live of a sandbox for which a client requests `timeout_s`."""
        given = [limit for limit in (timeout_s, self.max_timeout_s) if limit is not None]
        return min(given, default=None)


class TemplateCache:
    """Uploaded templates by key, least recently used dropped first, so that clients send each only once."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._templates: OrderedDict[str, Template] = OrderedDict()
        self._bytes = 0

    def put(self, template: Template) -> str:
        """Stores a template and returns its key. The last one stored is kept whatever its size."""
        key = template_key(template)
        if key not in self._templates:
            self._templates[key] = template
            self._bytes += _size(template)
        self._templates.move_to_end(key)
        while self._bytes > self._limit_bytes and len(self._templates) > 1:
            _, oldest = self._templates.popitem(last=False)
            self._bytes -= _size(oldest)
        return key

    def get(self, key: str) -> Template | None:
        """A template that is still stored; else None."""
        if key in self._templates:
            self._templates.move_to_end(key)
        return self._templates.get(key)


def _size(template: Template) -> int:
    return sum(map(len, template.contents.values()))


@dataclass(eq=False)
class Creation:
    """The creation of one idempotency key, shared by all requests with that key."""

    fingerprint: str
    task: asyncio.Task[Any]
    """Creates the object, such as a sandbox; its result is the id."""
    num_claims: int = 0
    """Requests that received the sandbox, or still wait for it."""


class Creations:
    """Creations by idempotency key. A failed one is dropped, so that the next request tries again."""

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self._by_key: OrderedDict[str, Creation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def get_or_start(self, key: str, body: object, begin: Callable[[], asyncio.Task[Any]]) -> Creation:
        """The key's creation, started now if it is new. Raises KeyConflictError for another body."""
        fingerprint = hashlib.blake2b(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self._evict()
        creation = self._by_key.get(key)
        if creation is not None:
            if creation.fingerprint != fingerprint:
                raise KeyConflictError(
                    "this key was already used for a different request",
                    field="Idempotency-Key",
                    received=key,
                    fix="use a new key for each creation",
                )
            return creation
        creation = self._by_key[key] = Creation(fingerprint, begin())
        return creation

    def _evict(self) -> None:
        finished = [key for key, creation in self._by_key.items() if creation.task.done()]
        num_over = len(self._by_key) - self._num_keys
        for place, key in enumerate(finished):
            task = self._by_key[key].task
            if place < num_over or task.cancelled() or task.exception() is not None:
                del self._by_key[key]


class KeyConflictError(ConfigError):
    """An idempotency key that was used for two different requests."""


@dataclass(eq=False)
class ServedSandbox:
    """A sandbox of this server, and the output streams of its background commands."""

    backend: str
    sandbox: Sandbox
    outputs: dict[int, OutputBuffer] = field(default_factory=dict[int, OutputBuffer])
    """By process id: output of the background commands that is streamed to clients."""

    def follow(self, pid: int, output: OutputBuffer) -> Coroutine[Any, Any, Encoded]:
        """A coroutine that ends when the background command was waited for, or its output is read no more."""
        self.outputs[pid] = output

        async def wait() -> Encoded:
            try:
                await output.finished.wait()
            finally:
                if self.outputs.get(pid) is output:
                    del self.outputs[pid]
            return None, b""

        return wait()

    def finish_output(self, pid: int) -> None:
        """Ends the output stream of a command that has ended."""
        output = self.outputs.pop(pid, None)
        if output is not None:
            output.finish()


class ServerState:
    """The state of one server, for one event loop."""

    def __init__(
        self,
        backends: Mapping[str, SandboxBackend],
        limits: Limits,
        peers: tuple[str, ...],
        spool: Path | None,
    ) -> None:
        if not backends:
            raise ConfigError("a server needs a backend", field="backends", fix="name at least one")
        self.backends = dict(backends)
        self.limits = limits
        self.peers = peers
        self._spool = spool or default_state_directory() / "spool"
        self._work: ScratchDirectory | None = None
        self.probe = MachineProbe(self._spool)
        """Measures this host's load, for fleets."""
        self.metrics = Metrics("etude_sandbox")
        self.templates = TemplateCache(limits.template_bytes)
        self.creations = Creations(limits.num_keys)
        self.draining = False
        self._served: dict[str, ServedSandbox] = {}
        self._ended: OrderedDict[str, ServedSandbox] = OrderedDict()
        self._num_registered = 0
        self._background = Tasks(on_error=self._count_background_error)

    def capacity(self) -> Capacity:
        """Cores, memory and disk of this host. Blocks."""
        self._spool.mkdir(parents=True, exist_ok=True)
        return machine_capacity(self._spool)

    def backend(self, name: str | None) -> tuple[str, SandboxBackend]:
        """A backend by name; None: the first. Raises ConfigError."""
        name = name or next(iter(self.backends))
        if name not in self.backends:
            raise ConfigError(
                "this server has no such backend",
                field="backend",
                received=name,
                fix="use one of " + ", ".join(self.backends),
            )
        return name, self.backends[name]

    def check_accepting(self) -> None:
        """Raises CapacityError while the server drains."""
        if self.draining:
            raise CapacityError(
                "the server is shutting down and makes no new sandboxes",
                field="sandbox.server",
                fix="use another server, or wait for its restart",
            )

    def register(self, backend: str, sandbox: Sandbox) -> ServedSandbox:
        """Adds a sandbox to the table."""
        served = self._served.get(sandbox.id)
        if served is None or served.sandbox is not sandbox:
            served = self._served[sandbox.id] = ServedSandbox(backend, sandbox)
            self._num_registered += 1
            if self._num_registered % PRUNE_EVERY == 0:
                self.in_background(self.prune())
        return served

    def remove(self, sandbox_id: str) -> None:
        """Removes a sandbox that has ended, and ends the output streams of its commands."""
        served = self._served.pop(sandbox_id, None)
        if served is not None:
            for pid in list(served.outputs):
                served.finish_output(pid)

    def get(self, sandbox_id: str) -> ServedSandbox | None:
        """A registered sandbox; else None."""
        return self._served.get(sandbox_id)

    async def find(self, sandbox_id: str) -> ServedSandbox:
        """A sandbox by its id; a paused one is not resumed. One that ended by itself is returned too, so that
        calls raise its own error: the agent may have let its time expire. Raises SandboxMissingError."""
        served = self._served.get(sandbox_id)
        if served is not None:
            return served
        for name, backend in self.backends.items():
            for info in await backend.list():
                if info.id == sandbox_id and info.state == "running":
                    return self.register(name, await backend.connect(sandbox_id))
        if sandbox_id in self._ended:
            return self._ended[sandbox_id]
        raise missing_sandbox(sandbox_id)

    async def connect(self, sandbox_id: str) -> ServedSandbox:
        """A sandbox by its id; a paused one is resumed. Raises SandboxMissingError."""
        served = self._served.get(sandbox_id)
        names = self.backends if served is None else [served.backend]
        missing: SandboxMissingError | None = None
        for name in names:
            try:
                return self.register(name, await self.backends[name].connect(sandbox_id))
            except SandboxMissingError as error:
                missing = error
        self._move_to_ended(sandbox_id)
        assert missing is not None, "there is at least one backend"
        raise missing

    async def prune(self) -> dict[str, int]:
        """Removes sandboxes that ended by themselves; the number of live ones of each backend."""
        live: dict[str, int] = {}
        for name, backend in self.backends.items():
            before = [served.sandbox.id for served in self._served.values() if served.backend == name]
            infos = await backend.list()
            ids = {info.id for info in infos}
            live[name] = sum(info.state == "running" for info in infos)
            for gone in set(before) - ids:
                self._move_to_ended(gone)
        return live

    def _move_to_ended(self, sandbox_id: str) -> None:
        served = self._served.get(sandbox_id)
        self.remove(sandbox_id)
        if served is not None:
            self._ended[sandbox_id] = served
            if len(self._ended) > _NUM_ENDED:
                self._ended.popitem(last=False)

    async def metrics_text(self) -> str:
        """All metrics in Prometheus' format, with the current numbers of live sandboxes and waiting calls."""
        gauges: dict[tuple[str, Labels], float] = {("etude_sandbox_draining", ()): float(self.draining)}
        for name, num in (await self.prune()).items():
            gauges["etude_sandbox_live", (("backend", name),)] = num
        for name, backend in self.backends.items():
            if isinstance(backend, PooledBackend):
                labels = (("backend", name),)
                gauges["etude_sandbox_queue", labels] = sum(backend.waiting.values())
                gauges["etude_sandbox_places", labels] = backend.max_live
                gauges["etude_sandbox_places_held", labels] = backend.num_held
        return self.metrics.text(gauges)

    def problems(self) -> list[str]:
        """Current problems of the backends, as text."""
        found: list[str] = []
        for name, backend in self.backends.items():
            found += [f"{name}: {line}" for line in backend.doctor()]
            if isinstance(backend, PooledBackend):
                found += [f"{name}: {line}" for line in backend.problems]
        return found

    def clear_spool(self) -> None:
        """Removes uploads and exports of killed servers, and creates this server's directory."""
        if self._work is None:
            self._work = work_directory(self._spool)

    def spool_directory(self) -> tempfile.TemporaryDirectory[str]:
        """A temporary directory for an upload or export, removed by its context manager."""
        self.clear_spool()
        assert self._work is not None, "it was just made"
        return tempfile.TemporaryDirectory(dir=self._work.path)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a background task of the server."""
        return self._background.start(work)

    def keep_running(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Lets a task whose client has disconnected run to its end in the background."""
        return self._background.add(task)

    def count_error(self, error: BaseException) -> None:
        """Counts the error of a call."""
        self.metrics.count("etude_sandbox_errors", kind=type(error).__name__)

    async def close(self) -> None:
        """Ends all tasks and closes all backends, even if one fails."""
        for sandbox_id in list(self._served):
            self.remove(sandbox_id)
        await self._background.close()
        if self._work is not None:
            await asyncio.to_thread(self._work.close)
        await finish_all(backend.close() for backend in self.backends.values())

    def _count_background_error(self, error: BaseException) -> None:
        if not isinstance(error, (UserError, AgentError)):
            self.metrics.count("etude_sandbox_background_failures")
