"""A backend that fails on purpose, for testing that infrastructure failures never count as an agent's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.errors import SandboxError
from etude.sandbox.calls import Answer
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Network, Resources
from etude.sandbox.wrapping import WrappedSandbox


class FaultyBackend:
    """`SandboxBackend` around another one: named operations fail a number of times, then succeed.

    Operations are `create`, the lifecycle methods of `Sandbox`, and the `op` of calls (`read`, `tests`); a
    diff that ends all processes is `final_diff`, a write of several files `write_many`. `kill` and `close`
    never fail, so that tests can count what is cleaned up.
    """

    def __init__(self, inner: SandboxBackend, failures: Mapping[str, int]) -> None:
        """`failures`: operation -> how many of its next calls raise SandboxError."""
        self.inner = inner
        self.remaining = dict(failures)
        self.num_created = 0
        self.num_killed = 0

    def __getattr__(self, name: str) -> Any:
        """All other attributes are the inner backend's."""
        return getattr(self.inner, name)

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """See SandboxBackend.create."""
        self.check("create")
        self.num_created += 1
        inner = await self.inner.create(template, resources, network, timeout_s, snapshot, metadata)
        return FaultySandbox(self, inner)

    def check(self, operation: str) -> None:
        """Raises SandboxError if failures remain for this operation."""
        if self.remaining.get(operation, 0) > 0:
            self.remaining[operation] -= 1
            raise SandboxError("failed on purpose", field="sandbox", received=operation)


class FaultySandbox(WrappedSandbox):
    """`Sandbox` whose operations fail when its backend says so."""

    def __init__(self, backend: FaultyBackend, inner: Sandbox) -> None:
        super().__init__(inner.id)
        self._backend = backend
        self._inner = inner
        self._dead = False

    async def reach(self, operation: str) -> Sandbox:
        """See WrappedSandbox.reach."""
        self._backend.check(operation)
        return self._inner

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """See Sandbox.call."""
        name = header["op"]
        if header.get("kill_processes"):
            name = "final_diff"
        elif len(header.get("files", ())) > 1:
            name = "write_many"
        return await self.perform(name, lambda s: s.call(header, payload, on_output))

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. The copies fail as this one does."""
        copies = await super().fork(count)
        return [
            copy if isinstance(copy, SandboxError) else FaultySandbox(self._backend, copy) for copy in copies
        ]

    async def kill(self) -> None:
        """See Sandbox.kill. Counted once; never fails on purpose."""
        if not self._dead:
            self._dead = True
            self._backend.num_killed += 1
        await self._inner.kill()
