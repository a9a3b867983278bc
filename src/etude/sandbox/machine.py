"""`MachineSandbox`: a sandbox on a machine (container, guest) that is reached by a channel.

It sends calls to the program inside as frames, and delegates its lifecycle (pause, copy, move, kill) to its
backend, a `MachineBackend`. Everything here is independent of the kind of machine.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from etude.errors import SandboxError
from etude.sandbox.calls import Answer, agents_fault, prepared, too_large_error
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
"""Operations that are answered only when the command or test run has ended."""


class Outputs:
    """The output listeners of one sandbox, by the request that started the command; that of a background
    command stays until the command has ended."""

    def __init__(self) -> None:
        self._by_request: dict[int, OnOutput] = {}
        self._in_background: dict[int, int] = {}
        """Process id -> the request that started it."""

    def add_listener(self, request_id: int, on_output: OnOutput) -> None:
        """Registers the listener for the command that a request starts."""
        self._by_request[request_id] = on_output

    def on_started(self, pid: int, request_id: int) -> None:
        """Records that a request has started a command in the background."""
        self._in_background[pid] = request_id

    def on_answered(self, request_id: int) -> None:
        """Removes the request's listener, unless it started a command in the background."""
        if request_id not in self._in_background.values():
            self._by_request.pop(request_id, None)

    def on_ended(self, pid: int) -> None:
        """Removes the listener of a background command that has ended."""
        self._by_request.pop(self._in_background.pop(pid, 0), None)

    def on_event(self, header: Header, payload: bytes) -> None:
        """Passes an `output` event, which `answers.frame_problem` has validated, to its listener."""
        listener = self._by_request.get(header["id"])
        if listener is not None:
            listener(header["fd"], payload)


class _Stopwatch:
    """Measures the total time during which at least one block of `running` was active."""

    def __init__(self) -> None:
        self.num_running = 0
        self._since_s = self._before_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
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
        """The measured seconds so far."""
        return self._before_s + (time.monotonic() - self._since_s if self.num_running else 0.0)


class _Gate:
    """Delays new calls while a sandbox is copied, and measures for how long.

    Closed at first, until `open`; then closed while any block of `closed` is active.
    """

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._closings = _Stopwatch()
        self.closed_s = self._closings.total_s
        """The total seconds for which blocks of `closed` have kept it closed."""

    async def wait(self) -> None:
        """Waits until it is open."""
        await self._is_open.wait()

    def open(self) -> None:
        """Opens it, or lets it open at the end of the blocks that keep it closed."""
        if not self._closings.num_running:
            self._is_open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keeps it closed for the block."""
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
        """Whether its time to live ended while it was in use, which counts as the agent's doing."""
        self.environment: dict[str, str] = {}
        """Environment variables of every command, besides the server's own."""
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
        """Whether a call is in progress, or calls were for most of its life."""
        most_s = (time.monotonic() - self._began_s) / 2
        return self._use.num_running > 0 or self._use.total_s() > most_s

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace inside."""
        return self.spec.template.workspace

    # The channel

    def attach(self, channel: Channel) -> None:
        """Uses the channel of a machine that now runs. Raises SandboxError if it has died already."""
        if channel.closed:
            raise SandboxError("the sandbox died during its start", field="sandbox", received=self.id)
        self._channel = channel
        channel.on_event = self._on_event
        channel.on_close = self._on_close
        self.state = "running"
        self._gate.open()

    def _on_close(self, reason: str) -> None:
        """Marks the machine as lost, unless we closed the channel ourselves."""
        if self._channel is not None and self.state == "running":
            self.state = "lost"
            self._drop_network()

    def _drop_network(self) -> None:
        egress, self._egress = self._egress, None
        if egress is not None:
            egress.close()

    async def connect_network(self, proxy: EgressProxy) -> None:
        """Connects the programs inside to the network through a proxy. Raises SandboxError."""
        self._egress = Egress(self.channel, proxy)
        self.environment |= proxy_environment()
        await self._egress.open()

    def detach(self, state: SandboxState) -> None:
        """Closes the channel of a machine that no longer runs, and sets the sandbox's state."""
        self.state = state
        self._drop_network()
        if self._channel is not None:
            self._channel.close(f"the sandbox is {state}")
        self._channel = None
        self._gate.open()

    def calls_blocked(self) -> AbstractContextManager[None]:
        """Delays new calls until the end of the block."""
        return self._gate.closed()

    @property
    def channel(self) -> Channel:
        """The channel to the program inside. Raises SandboxStateError if the sandbox is paused, SandboxError
        if it has ended."""
        if self._channel is None:
            paused = self.state == "paused"
            kind = SandboxStateError if paused else SandboxLostError if self.state == "lost" else SandboxError
            raise kind(
                f"the sandbox is {self.state}" if self.state != "running" else "the sandbox is starting",
                field="sandbox",
                received=self.id,
                fix="resume it first" if paused else "create another one",
            )
        return self._channel

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[Channel]:
        """Delays new calls and stops the sandbox's processes for the block."""
        channel = self.channel
        with self.calls_blocked():
            try:
                async with self._errors_judged():
                    await channel.request({"op": "freeze"}, b"", OPERATION_S)
                yield channel
            finally:
                # Nobody waits for the answer: a caller that was cancelled must not leave the sandbox frozen.
                if not channel.closed:
                    channel.send({"op": "thaw", "id": channel.next_id()})

    @asynccontextmanager
    async def held_for_copy(self) -> AsyncIterator[Channel]:
        """Delays new calls for the block. The sandbox holds back its answers until the caller sends a
        `greeting`: meanwhile the machine can be copied whole."""
        channel = self.channel
        with self.calls_blocked():
            try:
                async with self._errors_judged():
                    await channel.request({"op": "hold"}, b"", OPERATION_S)
            except BaseException:
                # It may already hold back its answers: a cancelled caller must not leave it so.
                if not channel.closed:
                    channel.send({**greeting(self.id), "id": channel.next_id()})
                raise
            yield channel

    @asynccontextmanager
    async def _errors_judged(self) -> AsyncIterator[None]:
        """Wraps every call of the program inside: counts as use, and attributes failures (see `blame`)."""
        try:
            with self._use.running():
                yield
        except FrameError as error:
            raise too_large_error(error) from error
        except SandboxError as error:
            raise await self._owner.blame(self, error) from error

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        ready = prepared(header, self.workspace, self.environment)
        answer, data = await self.job(ready, payload, on_output, header)
        if header["op"] == "wait":
            self._outputs.on_ended(header["pid"])
        return answer, data

    async def job(
        self,
        header: Header,
        payload: bytes = b"",
        on_output: OnOutput | None = None,
        asked: Header | None = None,
    ) -> Answer:
        """As `call`, with a header that is `prepared` already. `asked`: the caller's header, for errors."""
        await self._gate.wait()
        async with self._errors_judged():
            answer, data = await self._exchange(self.channel, header, payload, on_output)
        if "fault" in answer:
            raise agents_fault(answer["fault"], asked or header)
        return answer, data

    async def _exchange(
        self, channel: Channel, header: Header, payload: bytes, on_output: OnOutput | None
    ) -> Answer:
        """Sends a call and awaits its answer. A quick operation has a deadline of `OPERATION_S`, a command or
        test run one by its timeout, `wait` none."""
        is_lasting = header["op"] in _LASTING and not header.get("background")
        header["id"] = request_id = channel.next_id()
        if on_output is not None:
            self._outputs.add_listener(request_id, on_output)
        try:
            if is_lasting:
                most_s = (
                    None if header["op"] == "wait" else header["timeout_s"] + MOST_WAITING_S + OPERATION_S
                )
                channel.send(header, payload)
                return await channel.answer(request_id, most_s, self._gate.closed_s)
            answer, data = await channel.request(header, payload, OPERATION_S)
            if on_output is not None and "fault" not in answer:
                self._outputs.on_started(process_id(answer, self.id), request_id)
            return answer, data
        except asyncio.CancelledError:
            if is_lasting and not channel.closed:
                channel.send({"op": "cancel", "target": request_id})
            raise
        finally:
            self._outputs.on_answered(request_id)

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
    """The call that gives a copied machine its new identity, time and entropy."""
    return {
        "op": "hello",
        "time_s": time.time(),
        "entropy": secrets.token_hex(32),
        "hostname": name,
        "machine_id": secrets.token_hex(16),
    }
