"""A sandbox on a machine of some kind, reached by a channel: everything that does not depend on the kind.

`MachineSandbox` turns the protocol of `interface.Sandbox` into frames for the program inside; what a
frame cannot do (sleep, copy, move, end) it asks of its backend, a `MachineBackend`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from etude.errors import SandboxError, ToolArgumentError
from etude.sandbox.channel import Answer, Channel
from etude.sandbox.commands import ChannelCommands, ChannelShells
from etude.sandbox.egress import Egress
from etude.sandbox.errors import SandboxKilledByAgentError, SandboxLostError, SandboxStateError, fault_error
from etude.sandbox.files import ChannelFiles
from etude.sandbox.inside.frames import MAX_PAYLOAD_BYTES, Header
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.network.environment import proxy_environment
from etude.sandbox.network.proxy import EgressProxy
from etude.sandbox.paths import normal_path
from etude.sandbox.template import Template
from etude.sandbox.types import (
    NO_NETWORK,
    CommandResult,
    Network,
    ProbeReport,
    ProbeResult,
    Resources,
    SandboxInfo,
    SandboxState,
    SnapshotInfo,
    SnapshotKind,
    TestFailure,
    TestReport,
)

OPERATION_S = 60.0
"""A file operation that takes longer means that the sandbox is lost; the server itself allows it 2 s."""

_EARLY_BYTES, _MAX_EARLY = 1 << 20, 16


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

    def agents_doing(self, sandbox: MachineSandbox) -> str | None:
        """How the agent ended its sandbox's server, if it did; None: the failure is ours."""
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
        self.files = ChannelFiles(self)
        self.commands = ChannelCommands(self)
        self.state: SandboxState = "running"
        self.created_s = time.time()
        self.expires_s: float | None = None
        self.environment: dict[str, str] = {}
        """Of every command, beside the server's own."""
        self.lifecycle = asyncio.Lock()
        """Held by whoever pauses, resumes, copies or moves the sandbox."""
        self._shells = ChannelShells(self)
        self._owner = owner
        self._channel: Channel | None = None
        self._listeners: dict[int, OnOutput] = {}
        self._by_request: dict[int, OnOutput] = {}
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        self._gate = asyncio.Event()
        self._num_closings = 0
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
        self._open_gate()

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
        self._open_gate()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """In the block nothing new is asked of the sandbox: whoever wants to waits."""
        self._num_closings += 1
        self._gate.clear()
        try:
            yield
        finally:
            self._num_closings -= 1
            self._open_gate()

    def _open_gate(self) -> None:
        if not self._num_closings:
            self._gate.set()

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
                await channel.request({"op": "freeze"}, b"", OPERATION_S)
                yield channel
            finally:
                # Nobody waits for the answer: a caller that was cancelled must not leave the sandbox frozen.
                if not channel.closed:
                    channel.send({"op": "thaw", "id": channel.next_id()})

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Channel]:
        """In the block nothing new is asked of the sandbox, and it says nothing: it may be copied whole."""
        channel = self.channel
        with self.closed():
            await channel.request({"op": "hold"}, b"", OPERATION_S)
            yield channel

    async def call(self, header: Header, payload: bytes = b"", path: str | None = None) -> Answer:
        """One quick operation. Raises AgentError for the agent's mistakes, else SandboxError."""
        _check_size(payload)
        await self._gate.wait()
        answer, data = await self.channel.request(header, payload, OPERATION_S)
        if "fault" in answer:
            kind, message = answer["fault"]
            if kind == "argument" and "pattern" in header:
                raise fault_error((kind, message), "pattern", header["pattern"])
            if kind == "session":
                raise fault_error((kind, message), "session", header.get("session"))
            if "pid" in header:
                raise fault_error((kind, message), "pid", header["pid"])
            raise fault_error((kind, message), "path" if path is not None else None, path)
        return answer, data

    async def job(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """One command or test run; a cancelled caller ends it."""
        _check_size(payload)
        await self._gate.wait()
        channel = self.channel
        header["id"] = request_id = channel.next_id()
        if on_output is not None:
            self._by_request[request_id] = on_output
        try:
            channel.send(header, payload)
            answer, data = await channel.answer(request_id, header["timeout_s"] + OPERATION_S)
        except asyncio.CancelledError:
            if not channel.closed:
                channel.send({"op": "cancel", "target": request_id})
            raise
        except SandboxError as error:
            cause = self._owner.agents_doing(self) if self.state in ("running", "lost") else None
            if cause is None:
                raise
            raise SandboxKilledByAgentError(cause, field="sandbox", received=self.id) from error
        finally:
            self._by_request.pop(request_id, None)
        if "fault" in answer:
            kind, message = answer["fault"]
            raise fault_error(
                (kind, message), "session" if kind == "session" else None, header.get("session")
            )
        return answer, data

    async def wait(self, pid: int) -> Answer:
        """The end of a background command, whenever that is. A cancelled caller leaves it running."""
        await self._gate.wait()
        channel = self.channel
        header: Header = {"op": "wait", "pid": pid, "id": channel.next_id()}
        channel.send(header)
        try:
            answer, data = await channel.answer(header["id"], None)
        except asyncio.CancelledError:
            if not channel.closed:
                channel.send({"op": "cancel", "target": header["id"]})
            raise
        self._listeners.pop(pid, None)
        self._early.pop(pid, None)
        if "fault" in answer:
            kind, message = answer["fault"]
            raise fault_error((kind, message), "pid", pid)
        return answer, data

    def listen(self, pid: int, on_output: OnOutput) -> None:
        """From now on `on_output` gets the output of a background command."""
        self._listeners[pid] = on_output
        for number, data in self._early.pop(pid, []):
            on_output(number, data)

    def _on_event(self, header: Header, payload: bytes) -> None:
        if header["event"] == "output":
            listener = self._by_request.get(header["id"]) or self._listeners.get(header["pid"])
            if listener is not None:
                listener(header["fd"], payload)
            elif not header["id"]:
                self._keep_early(header["pid"], header["fd"], payload)
        elif self._egress is not None and header["event"].startswith("net."):
            self._egress.on_event(header, payload)

    def _keep_early(self, pid: int, number: int, data: bytes) -> None:
        """Output may be here before whoever started the command has heard of its process id."""
        early = self._early.setdefault(pid, [])
        if sum(len(known) for _, known in early) < _EARLY_BYTES:
            early.append((number, data))
        while len(self._early) > _MAX_EARLY:
            # Nobody will ever ask for this one: its start was cancelled.
            del self._early[next(iter(self._early))]

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
        run, error, timed_out, duration_s = await self._run("tests", paths, timeout_s)
        if run is None:
            return TestReport((), (), error, timed_out, duration_s)
        passed = tuple(str(name) for name in run["passed"])
        failed = tuple(TestFailure(str(name), str(message)) for name, message in run["failed"])
        return TestReport(passed, failed, error, False, duration_s)

    async def run_probes(self, paths: Sequence[str], timeout_s: float = 2.0) -> ProbeReport:
        """See Sandbox.run_probes."""
        run, error, timed_out, duration_s = await self._run("probes", paths, timeout_s)
        if run is None:
            return ProbeReport((), error, timed_out, duration_s)
        results = tuple(
            ProbeResult(str(path), str(name), tuple(values), failure and str(failure))
            for path, name, values, failure in run["results"]
        )
        return ProbeReport(results, error, False, duration_s)

    async def _run(
        self, operation: str, paths: Sequence[str], timeout_s: float
    ) -> tuple[dict[str, Any] | None, str | None, bool, float]:
        """(what the runner said, error, timed out, duration) of one run."""
        names = [normal_path(path, self.workspace) for path in paths]
        answer, data = await self.job({"op": operation, "paths": names, "timeout_s": timeout_s})
        duration_s = float(answer["duration_s"])
        if answer["timed_out"]:
            return None, "timeout", True, duration_s
        run = _parse_run(data, operation)
        if run is None:
            reason = f"exit code {answer['exit_code']}"
            if answer["memory_exceeded"]:
                reason = "memory limit exceeded"
            return None, f"the test run ended early: {reason}", False, duration_s
        error = run.get("error")
        return run, None if error is None else str(error), False, duration_s

    async def diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.diff."""
        return await self._diff(kill_processes=False)

    async def final_diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.final_diff."""
        return await self._diff(kill_processes=True)

    async def _diff(self, kill_processes: bool) -> Mapping[str, bytes | None]:
        answer, data = await self.call({"op": "diff", "kill_processes": kill_processes})
        changes: dict[str, bytes | None] = {}
        start = 0
        for path, size in answer["files"]:
            changes[path] = None if size is None else data[start : start + size]
            start += size or 0
        return dict(sorted(changes.items()))

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
        """See Sandbox.fork."""
        return await self._owner.fork(self, count)

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate."""
        return await self._owner.migrate(self, target)

    async def kill(self) -> None:
        """See Sandbox.kill."""
        await self._owner.kill(self)


def _check_size(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ToolArgumentError(
            f"more than {MAX_PAYLOAD_BYTES} bytes at once",
            field="data",
            received=len(payload),
            fix="upload a file, or write it in pieces",
        )


def _parse_run(data: bytes, operation: str) -> dict[str, Any] | None:
    """What a test process sent; None if it is not whole. The agent's code ran there: nothing is trusted."""
    try:
        run = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(run, dict):
        return None
    key, width = ("failed", 2) if operation == "tests" else ("results", 4)
    rows: object = run.get(key)
    if not isinstance(rows, list) or not isinstance(run.setdefault("passed", []), list):
        return None
    whole = all(isinstance(row, list) and len(row) == width for row in rows)
    return run if whole and (width == 2 or all(isinstance(row[2], list) for row in rows)) else None
