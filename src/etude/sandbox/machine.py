"""A sandbox on a machine of some kind, reached by a channel: everything that does not depend on the kind.

`MachineSandbox` carries calls to the program inside as frames; what a frame cannot do (sleep, copy, move,
end) it asks of its backend, a `MachineBackend`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from etude.errors import SandboxError
from etude.sandbox.calls import Answer, agents_fault, prepared, too_large
from etude.sandbox.channel import Channel
from etude.sandbox.commands import process_id
from etude.sandbox.egress import Egress
from etude.sandbox.errors import SandboxLostError, SandboxStateError
from etude.sandbox.inside.frames import FrameError, Header
from etude.sandbox.inside.processes import MOST_WAITING_S
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.network.proxy import EgressProxy, proxy_environment
from etude.sandbox.refusals import check_count
from etude.sandbox.snapshots import Spec
from etude.sandbox.types import (
    SandboxInfo,
    SandboxState,
    SnapshotInfo,
    SnapshotKind,
)

if TYPE_CHECKING:
    from etude.sandbox.machine_backend import MachineBackend

OPERATION_S = 60.0
"""A file operation that takes longer means that the sandbox is lost; the server itself ends it after 20 s."""
_LASTING = frozenset({"command", "tests", "probes", "wait"})
"""Operations that are answered when what they are about has ended."""


class Outputs:
    """Who hears what the commands of one sandbox print, as it comes: listeners by the request that started a
    command; of one in the background until it has ended."""

    def __init__(self) -> None:
        self._by_request: dict[int, OnOutput] = {}
        self._in_background: dict[int, int] = {}
        """Process id -> the request that started it."""

    def expect(self, request_id: int, on_output: OnOutput) -> None:
        """From now on `on_output` gets the output of what a request starts."""
        self._by_request[request_id] = on_output

    def started(self, pid: int, request_id: int) -> None:
        """A request has started a command in the background."""
        self._in_background[pid] = request_id

    def answered(self, request_id: int) -> None:
        """What still comes for the request goes to nobody, unless it started a command in the background."""
        if request_id not in self._in_background.values():
            self._by_request.pop(request_id, None)

    def ended(self, pid: int) -> None:
        """A background command has ended."""
        self._by_request.pop(self._in_background.pop(pid, 0), None)

    def on_event(self, header: Header, payload: bytes) -> None:
        """An `output` event, whose fields `answers.frame_problem` has looked at."""
        listener = self._by_request.get(header["id"])
        if listener is not None:
            listener(header["fd"], payload)


class _Stopwatch:
    """Measures for how long anything at all was going on."""

    def __init__(self) -> None:
        self.num_running = 0
        self._since_s = self._before_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Something goes on in the block."""
        if not self.num_running:
            self._since_s = time.monotonic()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._before_s += time.monotonic() - self._since_s

    def total_s(self) -> float:
        """The seconds so far."""
        return self._before_s + (time.monotonic() - self._since_s if self.num_running else 0.0)


class _Gate:
    """Lets nothing new through while a sandbox is copied, and tells for how long that was.

    Shut at first, until `open`; and for as long as anybody keeps it closed.
    """

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._closings = _Stopwatch()
        self.closed_s = self._closings.total_s
        """For how many seconds it has been kept closed, all in all."""

    async def wait(self) -> None:
        """Waits until it is open."""
        await self._is_open.wait()

    def open(self) -> None:
        """Opens it, unless it is kept closed: then it opens afterwards."""
        if not self._closings.num_running:
            self._is_open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keeps it closed in the block."""
        self._is_open.clear()
        try:
            with self._closings.running():
                yield
        finally:
            self.open()


class MachineSandbox(Sandbox):
    """One sandbox of a `MachineBackend`."""

    def __init__(self, owner: MachineBackend, sandbox_id: str, spec: Spec) -> None:
        super().__init__(sandbox_id)
        self.spec = spec
        self.state: SandboxState = "running"
        self.created_s = time.time()
        self.expires_s: float | None = None
        self.has_expired = False
        """Whether its time to live ended it, and that was the agent's doing."""
        self.environment: dict[str, str] = {}
        """Of every command, beside the server's own."""
        self.lifecycle = asyncio.Lock()
        """Held while the sandbox is paused, resumed, copied or moved."""
        self._owner = owner
        self._channel: Channel | None = None
        self._outputs = Outputs()
        self._gate = _Gate()
        self._use = _Stopwatch()
        self._began_s = time.monotonic()
        self._egress: Egress | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether something is asked of it now, or was for most of its life."""
        most_s = (time.monotonic() - self._began_s) / 2
        return self._use.num_running > 0 or self._use.total_s() > most_s

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace inside."""
        return self.spec.template.workspace

    # Its line

    def attach(self, channel: Channel) -> None:
        """The machine runs and answers on this channel. Raises SandboxError if it has died already."""
        if channel.closed:
            raise SandboxError("the sandbox died as it started", field="sandbox", received=self.id)
        self._channel = channel
        channel.on_event = self._on_event
        channel.on_close = self._on_close
        self.state = "running"
        self._gate.open()

    def _on_close(self, reason: str) -> None:
        """The line has ended. If nobody here ended it, the machine is lost."""
        if self._channel is not None and self.state == "running":
            self.state = "lost"
            self._drop_network()

    def _drop_network(self) -> None:
        egress, self._egress = self._egress, None
        if egress is not None:
            egress.close()

    async def connect_network(self, proxy: EgressProxy) -> None:
        """Gives the programs inside a way out. Raises SandboxError."""
        self._egress = Egress(self.channel, proxy)
        self.environment |= proxy_environment()
        await self._egress.open()

    def detach(self, state: SandboxState) -> None:
        """The machine no longer runs."""
        self.state = state
        self._drop_network()
        if self._channel is not None:
            self._channel.close(f"the sandbox is {state}")
        self._channel = None
        self._gate.open()

    def closed(self) -> AbstractContextManager[None]:
        """In the block nothing new is asked of the sandbox: callers wait."""
        return self._gate.closed()

    @property
    def channel(self) -> Channel:
        """The line to the program inside. Raises SandboxStateError if the sandbox sleeps, SandboxError if
        it is gone."""
        if self._channel is None:
            paused = self.state == "paused"
            kind = SandboxStateError if paused else SandboxLostError if self.state == "lost" else SandboxError
            raise kind(
                f"the sandbox is {self.state}" if self.state != "running" else "the sandbox is starting",
                field="sandbox",
                received=self.id,
                fix="resume it first" if paused else "make another one",
            )
        return self._channel

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[Channel]:
        """In the block nothing new is asked of the sandbox, and its processes are stopped."""
        channel = self.channel
        with self.closed():
            try:
                async with self._asking():
                    await channel.request({"op": "freeze"}, b"", OPERATION_S)
                yield channel
            finally:
                # Nobody waits for the answer: a caller that was cancelled must not leave the sandbox frozen.
                if not channel.closed:
                    channel.send({"op": "thaw", "id": channel.next_id()})

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Channel]:
        """In the block nothing new is asked of the sandbox, and it says nothing: it may be copied whole.
        The former holder greets it afterwards."""
        channel = self.channel
        with self.closed():
            try:
                async with self._asking():
                    await channel.request({"op": "hold"}, b"", OPERATION_S)
            except BaseException:
                # It may hold its answers back by now: a caller that was cancelled must not leave it so.
                if not channel.closed:
                    channel.send({**greeting(self.id), "id": channel.next_id()})
                raise
            yield channel

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Around everything that is asked of the program inside: failures in the block are judged."""
        try:
            with self._use.running():
                yield
        except FrameError as error:
            raise too_large(error) from error
        except SandboxError as error:
            raise await self._owner.blame(self, error) from error

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        ready = prepared(header, self.workspace, self.environment)
        answer, data = await self.job(ready, payload, on_output, header)
        if header["op"] == "wait":
            self._outputs.ended(header["pid"])
        return answer, data

    async def job(
        self,
        header: Header,
        payload: bytes = b"",
        on_output: OnOutput | None = None,
        asked: Header | None = None,
    ) -> Answer:
        """As `call`, of a header as the program inside takes it. `asked`: the caller's, which errors name."""
        await self._gate.wait()
        async with self._asking():
            answer, data = await self._exchange(self.channel, header, payload, on_output)
        if "fault" in answer:
            raise agents_fault(answer["fault"], asked or header)
        return answer, data

    async def _exchange(
        self, channel: Channel, header: Header, payload: bytes, on_output: OnOutput | None
    ) -> Answer:
        """A quick operation has a deadline of its own, a job that of its time, the wait for one none."""
        is_lasting = header["op"] in _LASTING and not header.get("background")
        header["id"] = request_id = channel.next_id()
        if on_output is not None:
            self._outputs.expect(request_id, on_output)
        try:
            if is_lasting:
                most_s = (
                    None if header["op"] == "wait" else header["timeout_s"] + MOST_WAITING_S + OPERATION_S
                )
                channel.send(header, payload)
                return await channel.answer(request_id, most_s, self._gate.closed_s)
            answer, data = await channel.request(header, payload, OPERATION_S)
            if on_output is not None and "fault" not in answer:
                self._outputs.started(process_id(answer, self.id), request_id)
            return answer, data
        except asyncio.CancelledError:
            if is_lasting and not channel.closed:
                channel.send({"op": "cancel", "target": request_id})
            raise
        finally:
            self._outputs.answered(request_id)

    def _on_event(self, header: Header, payload: bytes) -> None:
        if header["event"] == "output":
            self._outputs.on_event(header, payload)
        elif self._egress is not None and header["event"].startswith("net."):
            self._egress.on_event(header, payload)

    # Sandbox

    async def get_info(self) -> SandboxInfo:
        return SandboxInfo(
            id=self.id,
            backend=self._owner.name,
            template=self.spec.template.name,
            template_digest=self.spec.template.digest,
            state=self.state,
            resources=self.spec.resources,
            network=self.spec.network,
            created_s=self.created_s,
            expires_s=self.expires_s,
            parent=self.spec.parent,
            metadata=self.spec.metadata,
        )

    async def set_timeout(self, timeout_s: float | None) -> None:
        self._owner.expire_at(self, timeout_s)

    async def pause(self, mode: SnapshotKind = "full") -> None:
        await self._owner.pause(self, mode)

    async def resume(self) -> None:
        await self._owner.resume(self)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        return await self._owner.snapshot(self, kind, name)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Raises ConfigError for less than one copy."""
        check_count(count)
        return await self._owner.fork(self, count)

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        return await self._owner.migrate(self, target)

    async def kill(self) -> None:
        await self._owner.kill(self)


def greeting(name: str) -> Header:
    """What tells a machine that it is not the one from which it was copied: who it is now, and when."""
    return {
        "op": "hello",
        "time_s": time.time(),
        "entropy": secrets.token_hex(32),
        "hostname": name,
        "machine_id": secrets.token_hex(16),
    }
