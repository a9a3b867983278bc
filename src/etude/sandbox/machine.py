"""A sandbox on a machine of some kind, reached by a channel: everything that does not depend on the kind.

`MachineSandbox` turns the protocol of `interface.Sandbox` into frames for the program inside; what a
frame cannot do (sleep, copy, move, end) it asks of its backend, a `MachineBackend`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from etude.errors import AgentError, EtudeError, SandboxError, ToolArgumentError
from etude.sandbox.answers import changes
from etude.sandbox.arguments import check_count, check_timeout
from etude.sandbox.channel import Answer, Channel
from etude.sandbox.commands import ChannelCommands, ChannelShells
from etude.sandbox.egress import Egress
from etude.sandbox.errors import SandboxLostError, SandboxStateError, fault_error
from etude.sandbox.files import ChannelFiles
from etude.sandbox.gate import Gate
from etude.sandbox.inside.frames import FrameError, Header
from etude.sandbox.inside.waiting import MOST_WAITING_S
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.network.environment import proxy_environment
from etude.sandbox.network.proxy import EgressProxy
from etude.sandbox.outputs import Outputs
from etude.sandbox.paths import normal_path
from etude.sandbox.reports import probes_report, tests_report
from etude.sandbox.template import Template
from etude.sandbox.types import (
    NO_NETWORK,
    CommandResult,
    Network,
    ProbeReport,
    Resources,
    SandboxInfo,
    SandboxState,
    SnapshotInfo,
    SnapshotKind,
    TestReport,
)

OPERATION_S = 60.0
"""A file operation that takes longer means that the sandbox is lost; the server itself ends it after 20 s."""


@dataclass(frozen=True)
class Spec:
    """What a sandbox was asked to be."""

    template: Template
    resources: Resources = dataclasses.field(default_factory=Resources)
    network: Network = NO_NETWORK
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parent: str | None = None
    """The sandbox or snapshot it continues."""


class Owner(Protocol):
    """What a sandbox asks of its backend."""

    @property
    def name(self) -> str: ...

    async def blame(self, sandbox: MachineSandbox, error: SandboxError) -> EtudeError:
        """What a failed call raises: `error` where the failure is ours, else the agent's doing."""
        ...

    async def kill(self, sandbox: MachineSandbox) -> None: ...

    async def pause(self, sandbox: MachineSandbox, mode: SnapshotKind) -> None: ...

    async def resume(self, sandbox: MachineSandbox) -> None: ...

    async def snapshot(
        self, sandbox: MachineSandbox, kind: SnapshotKind | None, name: str | None
    ) -> SnapshotInfo: ...

    async def fork(self, sandbox: MachineSandbox, count: int) -> list[Sandbox | SandboxError]: ...

    async def migrate(self, sandbox: MachineSandbox, target: SandboxBackend) -> Sandbox: ...

    def expire_at(self, sandbox: MachineSandbox, timeout_s: float | None) -> None: ...


class MachineSandbox:
    """One sandbox of a `MachineBackend`. Any number of calls may be in flight."""

    def __init__(self, owner: Owner, sandbox_id: str, spec: Spec) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.files = ChannelFiles(self, sandbox_id)
        self.commands = ChannelCommands(self)
        self.state: SandboxState = "running"
        self.created_s = time.time()
        self.expires_s: float | None = None
        self.was_used = self.has_expired = False
        """Whether anything was asked of it, and whether its time to live ended it after that."""
        self.environment: dict[str, str] = {}
        """Of every command, beside the server's own."""
        self.lifecycle = asyncio.Lock()
        """Held by whoever pauses, resumes, copies or moves the sandbox."""
        self._shells = ChannelShells(self)
        self._owner = owner
        self._channel: Channel | None = None
        self._outputs = Outputs()
        self._gate = Gate()
        self._egress: Egress | None = None

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
        self.environment = proxy_environment()
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
        """In the block nothing new is asked of the sandbox: whoever wants to waits."""
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
        Whoever held it greets it afterwards."""
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
        self.was_used = True
        try:
            yield
        except FrameError as error:
            raise ToolArgumentError(
                f"more than a request holds at once: {error}", field="data", fix="write it in pieces"
            ) from error
        except SandboxError as error:
            raise await self._owner.blame(self, error) from error

    async def call(self, header: Header, payload: bytes = b"", path: str | None = None) -> Answer:
        """One quick operation. Raises AgentError for the agent's doing, else SandboxError."""
        await self._gate.wait()
        async with self._asking():
            answer, data = await self.channel.request(header, payload, OPERATION_S)
        if "fault" in answer:
            raise _agents_fault(answer["fault"], header, path)
        return answer, data

    async def job(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """One command or test run; a cancelled caller ends it."""
        await self._gate.wait()
        async with self._asking():
            answer, data = await self._run_job(self.channel, header, payload, on_output)
        if "fault" in answer:
            raise _agents_fault(answer["fault"], header)
        return answer, data

    async def _run_job(
        self, channel: Channel, header: Header, payload: bytes, on_output: OnOutput | None
    ) -> Answer:
        header["id"] = request_id = channel.next_id()
        if on_output is not None:
            self._outputs.expect(request_id, on_output)
        try:
            channel.send(header, payload)
            most_s = header["timeout_s"] + MOST_WAITING_S + OPERATION_S
            return await channel.answer(request_id, most_s, self._gate.closed_s)
        except asyncio.CancelledError:
            if not channel.closed:
                channel.send({"op": "cancel", "target": request_id})
            raise
        finally:
            self._outputs.answered(request_id)

    async def wait(self, pid: int) -> Answer:
        """The end of a background command, whenever that is. A cancelled caller leaves it running."""
        await self._gate.wait()
        async with self._asking():
            channel = self.channel
            header: Header = {"op": "wait", "pid": pid, "id": channel.next_id()}
            channel.send(header)
            try:
                answer, data = await channel.answer(header["id"], None)
            except asyncio.CancelledError:
                if not channel.closed:
                    channel.send({"op": "cancel", "target": header["id"]})
                raise
        self._outputs.ended(pid)
        if "fault" in answer:
            raise _agents_fault(answer["fault"], header)
        return answer, data

    def listen(self, pid: int, on_output: OnOutput) -> None:
        """From now on `on_output` gets the output of a background command."""
        self._outputs.listen(pid, on_output)

    def _on_event(self, header: Header, payload: bytes) -> None:
        if header["event"] == "output":
            self._outputs.on_event(header, payload)
        elif self._egress is not None and header["event"].startswith("net."):
            self._egress.on_event(header, payload)

    # Sandbox

    async def get_info(self) -> SandboxInfo:
        """See Sandbox.get_info."""
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
        """See Sandbox.set_timeout."""
        self._owner.expire_at(self, timeout_s)

    async def create_session(self, cwd: str | None = None, env: Mapping[str, str] | None = None) -> str:
        """See Sandbox.create_session."""
        return await self._shells.create(cwd, env)

    async def run_in_session(
        self, session: str, cmd: str, timeout_s: float = 30.0, limit_bytes: int = 64 << 10
    ) -> CommandResult:
        """See Sandbox.run_in_session."""
        return await self._shells.run(session, cmd, timeout_s, limit_bytes)

    async def close_session(self, session: str) -> None:
        """See Sandbox.close_session."""
        await self._shells.close(session)

    async def run_tests(self, paths: Sequence[str], timeout_s: float = 2.0) -> TestReport:
        """See Sandbox.run_tests."""
        return tests_report(*await self._run("tests", paths, timeout_s), self.id)

    async def run_probes(self, paths: Sequence[str], timeout_s: float = 2.0) -> ProbeReport:
        """See Sandbox.run_probes."""
        return probes_report(*await self._run("probes", paths, timeout_s), self.id)

    async def _run(self, operation: str, paths: Sequence[str], timeout_s: float) -> Answer:
        check_timeout(timeout_s)
        names = [normal_path(path, self.workspace) for path in paths]
        return await self.job({"op": operation, "paths": names, "timeout_s": timeout_s})

    async def diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.diff."""
        return await self._diff(kill_processes=False)

    async def final_diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.final_diff."""
        return await self._diff(kill_processes=True)

    async def _diff(self, kill_processes: bool) -> Mapping[str, bytes | None]:
        answer, data = await self.call({"op": "diff", "kill_processes": kill_processes})
        return changes(answer, data, self.id)

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """See Sandbox.pause."""
        await self._owner.pause(self, mode)

    async def resume(self) -> None:
        """See Sandbox.resume."""
        await self._owner.resume(self)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """See Sandbox.create_snapshot."""
        return await self._owner.snapshot(self, kind, name)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Raises ConfigError for less than one copy."""
        check_count(count)
        return await self._owner.fork(self, count)

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate."""
        return await self._owner.migrate(self, target)

    async def kill(self) -> None:
        """See Sandbox.kill."""
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


def _agents_fault(fault: Sequence[str], header: Header, path: str | None = None) -> AgentError:
    """The error for a fault (kind, message), with what of the request it is about."""
    kind, message = fault
    if kind == "argument" and "pattern" in header:
        return fault_error((kind, message), "pattern", header["pattern"])
    if kind == "session":
        return fault_error((kind, message), "session", header.get("session"))
    if "pid" in header:
        return fault_error((kind, message), "pid", header["pid"])
    return fault_error((kind, message), "path" if path is not None else None, path)
