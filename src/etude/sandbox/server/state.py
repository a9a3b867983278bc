"""The state of a server: backends, sandboxes, templates, keys of creations; and what it counts."""

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
"""After so many new sandboxes those that ended by themselves are forgotten."""
_NUM_ENDED = 4096
"""Of those, so many still say themselves what became of them."""


@dataclass(frozen=True)
class Limits:
    """What a server takes from its clients. Sizes in bytes."""

    body_bytes: int = 64 << 20
    """Of one request that is held in memory; larger files are streamed."""
    upload_bytes: int = 16 << 30
    """Of one streamed upload or imported snapshot; spooled on disk."""
    template_bytes: int = 512 << 20
    """Of all templates that are kept for further creations; the least used go first."""
    num_keys: int = 4096
    """Keys of finished creations that are remembered."""
    max_forks: int = 256
    """Copies in one request."""
    max_timeout_s: float | None = None
    """Longest time to live; also that of sandboxes whose client names none. None: unbounded."""
    unclaimed_s: float = 60.0
    """How long a sandbox lives whose creator left before it was ready and did not ask again."""

    def bound_life(self, timeout_s: float | None) -> float | None:
        """The time to live of a sandbox whose client asks for `timeout_s`."""
        given = [one for one in (timeout_s, self.max_timeout_s) if one is not None]
        return min(given, default=None)


class TemplateShelf:
    """Templates by their key, so that a thousand creations send one only once."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._templates: OrderedDict[str, Template] = OrderedDict()
        self._bytes = 0

    def put(self, template: Template) -> str:
        """Keeps a template; its key. The last one put is kept whatever its size."""
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
        """A template that is still kept."""
        if key in self._templates:
            self._templates.move_to_end(key)
        return self._templates.get(key)


def _size(template: Template) -> int:
    return sum(map(len, template.contents.values()))


@dataclass(eq=False)
class Creation:
    """One key's creation: who asks again with the key gets the same sandbox."""

    fingerprint: str
    task: asyncio.Task[Any]
    """Makes what was asked for, such as a sandbox; gives its id."""
    num_claims: int = 0
    """Requests that got the sandbox, or still wait for it."""


class Creations:
    """Creations by idempotency key. A failed one is forgotten: the next request tries again."""

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self._by_key: OrderedDict[str, Creation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def enter(self, key: str, body: object, begin: Callable[[], asyncio.Task[Any]]) -> Creation:
        """The key's creation, begun now if it is new. Raises KeyConflictError for another body."""
        fingerprint = hashlib.blake2b(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self._forget()
        creation = self._by_key.get(key)
        if creation is not None:
            if creation.fingerprint != fingerprint:
                raise KeyConflictError(
                    "this key came with another request before",
                    field="Idempotency-Key",
                    received=key,
                    fix="use a new key for each creation",
                )
            return creation
        creation = self._by_key[key] = Creation(fingerprint, begin())
        return creation

    def _forget(self) -> None:
        finished = [key for key, creation in self._by_key.items() if creation.task.done()]
        num_over = len(self._by_key) - self._num_keys
        for place, key in enumerate(finished):
            task = self._by_key[key].task
            if place < num_over or task.cancelled() or task.exception() is not None:
                del self._by_key[key]


class KeyConflictError(ConfigError):
    """An idempotency key that came with two different requests."""


@dataclass(eq=False)
class Held:
    """A sandbox of this server, and what its clients have running in it."""

    backend: str
    sandbox: Sandbox
    outputs: dict[int, OutputBuffer] = field(default_factory=dict[int, OutputBuffer])
    """By process id: of the background commands whose output is on its way to a client."""

    def follow(self, pid: int, output: OutputBuffer) -> Coroutine[Any, Any, Encoded]:
        """What ends once somebody has waited for a background command, or the reader of its output leaves."""
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
        """A command has ended: its client's stream may end."""
        output = self.outputs.pop(pid, None)
        if output is not None:
            output.finish()


class ServerState:
    """All of it, for one event loop."""

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
        """Of this host, for fleets."""
        self.metrics = Metrics("etude_sandbox")
        self.templates = TemplateShelf(limits.template_bytes)
        self.creations = Creations(limits.num_keys)
        self.draining = False
        self._held: dict[str, Held] = {}
        self._ended: OrderedDict[str, Held] = OrderedDict()
        self._num_held = 0
        self._background = Tasks(on_error=self._note_background_error)

    def capacity(self) -> Capacity:
        """What this host has. Blocks."""
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
                fix="one of " + ", ".join(self.backends),
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

    def hold(self, backend: str, sandbox: Sandbox) -> Held:
        """Knows a sandbox from now on."""
        held = self._held.get(sandbox.id)
        if held is None or held.sandbox is not sandbox:
            held = self._held[sandbox.id] = Held(backend, sandbox)
            self._num_held += 1
            if self._num_held % PRUNE_EVERY == 0:
                self.in_background(self.prune())
        return held

    def forget(self, sandbox_id: str) -> None:
        """A sandbox has ended; streams of its commands end."""
        held = self._held.pop(sandbox_id, None)
        if held is not None:
            for pid in list(held.outputs):
                held.finish_output(pid)

    def known(self, sandbox_id: str) -> Held | None:
        """A sandbox that this server made or found before."""
        return self._held.get(sandbox_id)

    async def find(self, sandbox_id: str) -> Held:
        """A sandbox by its id; one that sleeps is not woken, and one that ended by itself answers as it does
        where it lives: its time may have been the agent's to keep. Raises SandboxMissingError."""
        held = self._held.get(sandbox_id)
        if held is not None:
            return held
        for name, backend in self.backends.items():
            for info in await backend.list():
                if info.id == sandbox_id and info.state == "running":
                    return self.hold(name, await backend.connect(sandbox_id))
        if sandbox_id in self._ended:
            return self._ended[sandbox_id]
        raise missing_sandbox(sandbox_id)

    async def connect(self, sandbox_id: str) -> Held:
        """A sandbox by its id; one that sleeps is woken. Raises SandboxMissingError."""
        held = self._held.get(sandbox_id)
        backends = self.backends.items() if held is None else [(held.backend, self.backends[held.backend])]
        missing: SandboxMissingError | None = None
        for name, backend in backends:
            try:
                return self.hold(name, await backend.connect(sandbox_id))
            except SandboxMissingError as error:
                missing = error
        self._set_aside(sandbox_id)
        assert missing is not None, "there is at least one backend"
        raise missing

    async def prune(self) -> dict[str, int]:
        """Forgets sandboxes that ended by themselves; the number of live ones of each backend."""
        live: dict[str, int] = {}
        for name, backend in self.backends.items():
            before = [held.sandbox.id for held in self._held.values() if held.backend == name]
            infos = await backend.list()
            ids = {info.id for info in infos}
            live[name] = sum(info.state == "running" for info in infos)
            for gone in set(before) - ids:
                self._set_aside(gone)
        return live

    def _set_aside(self, sandbox_id: str) -> None:
        held = self._held.get(sandbox_id)
        self.forget(sandbox_id)
        if held is not None:
            self._ended[sandbox_id] = held
            if len(self._ended) > _NUM_ENDED:
                self._ended.popitem(last=False)

    async def metrics_text(self) -> str:
        """See Metrics.text; with what lives and waits now."""
        gauges: dict[tuple[str, Labels], float] = {("etude_sandbox_draining", ()): float(self.draining)}
        for name, num in (await self.prune()).items():
            gauges["etude_sandbox_live", (("backend", name),)] = num
        for name, backend in self.backends.items():
            if isinstance(backend, PooledBackend):
                labels = (("backend", name),)
                gauges["etude_sandbox_queue", labels] = sum(backend.waiting.values())
                gauges["etude_sandbox_places", labels] = backend.max_live
                gauges["etude_sandbox_places_held", labels] = backend.held
        return self.metrics.text(gauges)

    def problems(self) -> list[str]:
        """What does not work at present, in words."""
        found: list[str] = []
        for name, backend in self.backends.items():
            found += [f"{name}: {line}" for line in backend.doctor()]
            if isinstance(backend, PooledBackend):
                found += [f"{name}: {line}" for line in backend.problems]
        return found

    def clear_spool(self) -> None:
        """Removes what killed servers left of uploads and exports, and makes this one's directory."""
        if self._work is None:
            self._work = work_directory(self._spool)

    def spool_directory(self) -> tempfile.TemporaryDirectory[str]:
        """A directory for what passes through, removed by its context manager."""
        self.clear_spool()
        assert self._work is not None, "it was just made"
        return tempfile.TemporaryDirectory(dir=self._work.path)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Work that goes on without a client."""
        return self._background.start(work)

    def finish_later(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Sees to it that a task whose client has left goes on to its end."""
        return self._background.add(task)

    def note_error(self, error: BaseException) -> None:
        """Counts what a call failed with."""
        self.metrics.count("etude_sandbox_errors", kind=type(error).__name__)

    async def close(self) -> None:
        """Ends everything; each backend is closed even if another fails."""
        for sandbox_id in list(self._held):
            self.forget(sandbox_id)
        await self._background.close()
        if self._work is not None:
            await asyncio.to_thread(self._work.close)
        await finish_all(backend.close() for backend in self.backends.values())

    def _note_background_error(self, error: BaseException) -> None:
        if not isinstance(error, (UserError, AgentError)):
            self.metrics.count("etude_sandbox_background_failures")
