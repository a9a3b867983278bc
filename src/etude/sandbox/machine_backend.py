"""Base class of backends with machines: the table of live sandboxes, time to live, pause and copies.

Each kind of machine implements `boot`, `stop` and, if it supports them, `save` and `restore`:

    create            boot                  or, of a snapshot, restore
    pause / resume    save + stop / restore
    create_snapshot   save
    fork              save once, restore `count` times      (overridden by kinds that can do better)
    migrate           save, export, import and restore on the target, stop here

A machine whose start fails, times out or is cancelled is stopped; a failed pause leaves the sandbox running.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, EtudeError, SandboxError
from etude.kit.tasks import finish_despite_cancel
from etude.sandbox.blame import Blame, Evidence
from etude.sandbox.channel import Channel
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.migration import (
    default_state_directory,
    gather_copies,
    replace_source,
    transfer,
)
from etude.sandbox.network.log import RequestLog
from etude.sandbox.network.proxy import EgressProxy
from etude.sandbox.refusals import (
    check_life,
    check_move,
    check_resources,
    missing_sandbox,
    unsupported_copy,
)
from etude.sandbox.snapshot_keeper import SnapshotKeeper
from etude.sandbox.snapshots import Snapshot, Spec
from etude.sandbox.template import Template
from etude.sandbox.types import (
    NO_NETWORK,
    Capabilities,
    Network,
    Resources,
    SandboxInfo,
    SnapshotInfo,
    SnapshotKind,
)

__all__ = ["MachineBackend", "default_state_directory", "gather_copies"]


class MachineBackend(SnapshotKeeper, SandboxBackend):
    """Base of the backends whose sandboxes are `MachineSandbox`es. For one event loop."""

    allow_private: tuple[str, ...] = ()
    """`IP:port`s of private addresses that the operator lets sandboxes reach if their rules allow it."""
    own_server: str = ""
    """`IP:port` of a server in this process, which sandboxes reach at `OWN_URL` if their rules allow it."""
    works_in_directories = False
    """Whether the workspace of a sandbox can be a directory of the host."""

    def __init__(self, state: Path | None = None) -> None:
        """`state`: directory of snapshots, logs and working files, created when first needed."""
        super().__init__(state)
        self._request_log: RequestLog | None = None
        self._live: dict[str, MachineSandbox] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closed = False
        self._blame = Blame()

    # For each kind of machine

    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    async def boot(self, sandbox: MachineSandbox) -> Channel:
        """Starts a machine for `sandbox.spec`; its ready channel. Raises SandboxError, ResourceError."""
        raise NotImplementedError

    async def stop(self, sandbox: MachineSandbox) -> None:
        """Ends the sandbox's machine, in whatever state it is, and frees its resources. Idempotent."""
        raise NotImplementedError

    async def restore(self, sandbox: MachineSandbox, snapshot: Snapshot) -> Channel:
        """Starts a machine that continues from the snapshot."""
        raise self.unsupported(snapshot.info.kind)

    def agents_doing(self, sandbox: MachineSandbox) -> str | None:
        """How the agent ended its sandbox's server, as far as that can be observed; see `blame`."""
        return None

    def host_failure(self, sandbox: MachineSandbox) -> str | None:
        """How this host failed, as far as that can be observed; see `blame`."""
        return None

    def doctor(self) -> list[str]:
        return []

    # SandboxBackend

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> MachineSandbox:
        check_life(timeout_s)
        if snapshot is None:
            spec = Spec(
                template or Template(), resources or Resources(), network or NO_NETWORK, dict(metadata or {})
            )
            return await self.start(spec, timeout_s)
        if template is not None or resources is not None:
            raise ConfigError(
                "a snapshot brings its own template and resources",
                field="snapshot",
                received=snapshot,
                fix="give one or the other",
            )
        saved = await self.snapshots.open(snapshot)
        spec = dataclasses.replace(
            saved.spec,
            network=network or saved.spec.network,
            metadata=dict(saved.spec.metadata if metadata is None else metadata),
        )
        return await self.start(spec, timeout_s, saved)

    async def start(
        self, spec: Spec, timeout_s: float | None = None, snapshot: Snapshot | None = None
    ) -> MachineSandbox:
        """A new sandbox for a spec, booted or restored."""
        self._check(spec)
        await self._clear_litter()
        sandbox = MachineSandbox(self, self.new_id(), spec)
        if snapshot is None:
            return await self.begin(sandbox, self.boot, timeout_s=timeout_s)
        self._check_snapshot(snapshot)
        return await self.begin(sandbox, self.restore, snapshot, timeout_s=timeout_s)

    async def begin(
        self,
        sandbox: MachineSandbox,
        start: Callable[..., Awaitable[Channel]],
        *arguments: Any,
        timeout_s: float | None = None,
    ) -> MachineSandbox:
        """Starts a machine by `start(sandbox, *arguments)`; kills the sandbox if it fails or is cancelled."""
        self._live[sandbox.id] = sandbox
        try:
            # Checked again, as the backend may have been closed since the start was requested.
            self.check_accepting()
            await self._attach(sandbox, start(sandbox, *arguments))
        except BaseException:
            await asyncio.shield(self.kill(sandbox))
            raise
        self.expire_at(sandbox, timeout_s)
        return sandbox

    async def _attach(self, sandbox: MachineSandbox, starting: Awaitable[Channel]) -> None:
        """Waits for a machine that starts or resumes; stops it if its sandbox was killed meanwhile."""
        channel = await starting
        if sandbox.id not in self._live:
            channel.close("the sandbox was killed while it started")
            await asyncio.shield(self.stop(sandbox))
            raise _killed(sandbox, "started")
        sandbox.attach(channel)
        await self.connect_network(sandbox)

    async def connect_network(self, sandbox: MachineSandbox) -> None:
        """Connects a sandbox to the network that its spec names, through a proxy of its own."""
        rules = sandbox.spec.network.allow
        if rules:
            await sandbox.connect_network(
                EgressProxy(
                    rules,
                    self.request_log(),
                    sandbox.id,
                    allow_private=self.allow_private,
                    own_server=self.own_server,
                )
            )

    def request_log(self) -> RequestLog:
        """The log of the sandboxes' network requests, which the egress proxies write."""
        if self._request_log is None:
            self.state.mkdir(parents=True, exist_ok=True)
            self._request_log = RequestLog.to_file(self.state / "network.jsonl")
        return self._request_log

    async def connect(self, sandbox_id: str) -> MachineSandbox:
        sandbox = self._live.get(sandbox_id)
        if sandbox is None:
            raise missing_sandbox(sandbox_id)
        if sandbox.state == "paused":
            await self.resume(sandbox)
        return sandbox

    async def list(self) -> list[SandboxInfo]:
        return [await sandbox.get_info() for sandbox in self._live.values()]

    async def close(self) -> None:
        self._closed = True
        ends = [self.kill(sandbox) for sandbox in self._live.values()]
        ends += [self._delete_unclaimed(snapshot) for snapshot in self._in_transit]
        results = await asyncio.gather(*ends, return_exceptions=True)
        await self._background.wait()
        results += self._background_errors
        self._background_errors.clear()
        log, self._request_log = self._request_log, None
        if log is not None:
            log.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # Called by sandboxes

    async def blame(self, sandbox: MachineSandbox, error: SandboxError) -> EtudeError:
        """The exception for a failed call: `error` if the failure is ours, else SandboxKilledByAgentError."""
        if sandbox.has_expired:
            return SandboxKilledByAgentError(
                "its time to live has expired", field="sandbox", received=sandbox.id, fix="give it more time"
            )
        evidence = Evidence(
            lambda: sandbox.state in ("paused", "killed"),
            lambda: self.host_failure(sandbox),
            lambda: self.agents_doing(sandbox),
            lambda: sum(other.state in ("running", "lost") for other in self._live.values()),
        )
        return await self._blame.judge(sandbox.id, error, evidence)

    async def kill(self, sandbox: MachineSandbox) -> None:
        if self._live.pop(sandbox.id, None) is None:
            return
        timer = self._timers.pop(sandbox.id, None)
        if timer is not None:
            timer.cancel()
        sandbox.detach("killed")
        await finish_despite_cancel(self._free(sandbox))

    async def _free(self, sandbox: MachineSandbox) -> None:
        await self.stop(sandbox)
        saved = self._asleep.pop(sandbox.id, None)
        if saved is not None:
            await self.delete_snapshot(saved)

    async def pause(self, sandbox: MachineSandbox, mode: SnapshotKind) -> None:
        if mode not in self.capabilities().pause:
            raise unsupported_copy(self.capabilities(), "pause", mode)
        await self.fall_asleep(sandbox, mode)

    async def fall_asleep(self, sandbox: MachineSandbox, mode: SnapshotKind, temporary: bool = False) -> None:
        """As `pause`; a `temporary` snapshot is removed with this process."""
        async with sandbox.lifecycle:
            if sandbox.state == "paused":
                return
            # Calls are blocked until it sleeps: effects of a call after the copy would be lost.
            with sandbox.calls_blocked():
                info = await self._save(sandbox, mode, f"asleep-{sandbox.id}", temporary)
                if sandbox.id not in self._live:
                    await self.delete_snapshot(info.id)
                    raise _killed(sandbox, "was pausing")
                self._asleep[sandbox.id] = info.id
                sandbox.detach("paused")
                await finish_despite_cancel(self.stop(sandbox))

    async def resume(self, sandbox: MachineSandbox) -> None:
        async with sandbox.lifecycle:
            if sandbox.state != "paused":
                return
            saved = self._asleep[sandbox.id]
            snapshot = await self.snapshots.open(saved)
            try:
                await self._attach(sandbox, self.restore(sandbox, snapshot))
            except BaseException:
                sandbox.detach("paused" if sandbox.id in self._live else "killed")
                await asyncio.shield(self.stop(sandbox))
                raise
            if self._asleep.pop(sandbox.id, None) is not None:  # else it was killed meanwhile
                await self.delete_snapshot(saved)

    async def snapshot(
        self, sandbox: MachineSandbox, kind: SnapshotKind | None, name: str | None
    ) -> SnapshotInfo:
        able = self.capabilities().snapshots
        wanted: SnapshotKind = kind or ("full" if "full" in able else "filesystem")
        if wanted not in able:
            raise unsupported_copy(self.capabilities(), "create_snapshot", wanted)
        async with sandbox.lifecycle:
            return await self._save(sandbox, wanted, name)

    async def fork(self, sandbox: MachineSandbox, count: int) -> list[Sandbox | SandboxError]:
        kind = self.capabilities().fork
        if kind is None:
            raise self.unsupported("full")
        async with sandbox.lifecycle:
            info = await self._save(sandbox, kind, None, temporary=True)
        try:
            snapshot = await self.snapshots.open(info.id)
            spec = self.copied_spec(sandbox)
            return await gather_copies([self.start(spec, None, snapshot) for _ in range(count)])
        finally:
            await self.delete_snapshot(info.id)

    async def migrate(self, sandbox: MachineSandbox, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate. The sandbox is paused while its state is transferred, so that no writes are
        lost. Raises Unsupported before it is paused."""
        if sandbox.channel.closed:
            raise SandboxError("the sandbox is lost", field="sandbox", received=sandbox.id)
        remaining_s = None if sandbox.expires_s is None else max(0.1, sandbox.expires_s - time.time())
        able = self.capabilities()
        check_move(able, await target.hello())
        await self.fall_asleep(sandbox, able.migrate or "filesystem", temporary=True)
        saved = self._asleep.get(sandbox.id)
        if saved is None:
            raise _killed(sandbox, "was pausing")
        try:
            moved = await transfer(
                lambda file: self.export_snapshot(saved, file),
                self.state,
                target,
                remaining_s,
                target is self,
            )
        except BaseException:
            await asyncio.shield(self.resume(sandbox))
            raise
        return await replace_source(moved, self.kill(sandbox))

    def expire_at(self, sandbox: MachineSandbox, timeout_s: float | None) -> None:
        check_life(timeout_s)
        timer = self._timers.pop(sandbox.id, None)
        if timer is not None:
            timer.cancel()
        sandbox.expires_s = None
        if timeout_s is None or sandbox.id not in self._live:
            return
        sandbox.expires_s = time.time() + timeout_s
        loop = asyncio.get_running_loop()
        self._timers[sandbox.id] = loop.call_later(timeout_s, self._expire, sandbox)

    def new_id(self) -> str:
        """A new sandbox id, unique across hosts."""
        return f"{self.name}-{secrets.token_hex(6)}"

    def copied_spec(self, sandbox: MachineSandbox) -> Spec:
        """The spec for a copy of a sandbox."""
        return dataclasses.replace(sandbox.spec, parent=sandbox.id)

    def mark_lost(self, sandbox: MachineSandbox) -> None:
        """Marks a sandbox whose machine died by itself; it stays listed until it is killed."""
        if sandbox.state == "running":
            sandbox.detach("lost")

    # Inner workings

    def _expire(self, sandbox: MachineSandbox) -> None:
        # An agent must not void its session by letting the time run out, nor fail for an idle owner's time.
        sandbox.has_expired = sandbox.is_in_use and sandbox.state == "running"
        self.spawn(self.kill(sandbox))

    def check_accepting(self) -> None:
        """Raises SandboxError if the backend is closed."""
        if self._closed:
            raise SandboxError("the backend is closed", field="sandbox.backend", received=self.name)

    def _check(self, spec: Spec) -> None:
        """Raises for a spec that this backend or this host does not support."""
        self.check_accepting()
        able = self.capabilities()
        if spec.network.allow and not able.network:
            raise self.unsupported("network")
        if spec.template.image is not None and not able.images:
            raise self.unsupported("images")
        if spec.template.directory and not self.works_in_directories:
            raise self.unsupported("directory")
        check_resources(spec.resources)


def _killed(sandbox: MachineSandbox, doing: str) -> SandboxError:
    return SandboxError(f"the sandbox was killed while it {doing}", field="sandbox", received=sandbox.id)
