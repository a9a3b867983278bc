"""What a replica serves its users, kept while it is lent and put back when it comes home.

at home   administrator ──stage, activate──> engine
away      administrator ──stage, activate──> host memory ──put_back()──> engine
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from torch import Tensor

from etude.inference.server.errors import LoanConflictError
from etude.protocols import KvPolicy, Sampler, WeightSink
from etude.records import PolicyVersion, WeightManifest
from etude.weights import check_staged

_log = logging.getLogger("etude.inference.server")
T = TypeVar("T")


class LendableEngine(Sampler, WeightSink, Protocol):
    """An engine that can be lent: see EngineService."""

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]: ...

    async def stage(self, manifest: WeightManifest, tensors: Mapping[str, Tensor] | None = None) -> None: ...

    def usage(self) -> Mapping[str, float]: ...


class HomeWeights:
    """Implements WeightSink for administrators: what they put into service while the replica is lent is what
    it comes home to. For one event loop."""

    def __init__(self, engine: LendableEngine, manifest: WeightManifest) -> None:
        """`manifest`: in service now."""
        self.is_away = False
        """Whether the replica is lent."""
        self.swapping = asyncio.Lock()
        """Held to stage or activate in the engine."""
        self.trouble = ""
        """Why what users get cannot be put back, while that is tried."""
        self._engine, self._manifest = engine, manifest
        self._tensors: Mapping[str, Tensor] | None = None
        """Of the manifest, while the replica is away."""
        self._next: WeightManifest | None = None
        """Staged by an administrator."""
        self._is_staged = False
        """Whether the engine has it beside what is in service."""

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage. While the replica is lent the weights are only looked at."""
        async with self.swapping:
            if self.is_away:
                await in_thread(lambda: self._engine.fetch(manifest))
            else:
                await self._engine.stage(manifest)
            self._next, self._is_staged = manifest, not self.is_away

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. While the replica is lent: what it will come home to."""
        async with self.swapping:
            staged = check_staged(version, self._next)
            tensors: Mapping[str, Tensor] | None = None
            if self.is_away:
                tensors = await in_thread(lambda: self._engine.fetch(staged))
            else:
                if not self._is_staged:  # it was away then
                    await self._engine.stage(staged)
                await self._engine.activate(version, kv)
            self._manifest, self._tensors, self._next = staged, tensors, None

    def current(self) -> PolicyVersion | None:
        """See WeightSink.current: what users get; None while they get nothing."""
        return None if self.is_away else self._engine.current()

    # ---- loans ----------------------------------------------------------------------------------

    async def leave(self) -> None:
        """From now on the engine is another's; what users get is in host memory.

        Raises WeightUpdateError where it cannot be kept, LoanConflictError where it is lent already; then
        nothing has changed.
        """
        async with self.swapping:
            if self.is_away:
                raise LoanConflictError("the replica has just been lent", field="state", fix="recall it")
            self._tensors = await in_thread(lambda: self._engine.fetch(self._manifest))
            self.is_away, self._is_staged = True, False

    async def put_back(self) -> bool:
        """Puts what users get back into service; False, with `trouble`, where that failed. With `swapping`
        held."""
        try:
            await self._engine.stage(self._manifest, self._tensors)
            await self._engine.activate(self._manifest.version, "recompute")
        except Exception as error:  # whatever it is: no user may meet the run's weights
            self.trouble = f"{self._manifest.version} does not come back: {error}"
            _log.error("%s", self.trouble, exc_info=error)
            return False
        self.trouble = ""
        return True

    def come_home(self) -> None:
        """The engine serves what users get again."""
        self.is_away, self._tensors = False, None


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` gives, in a thread that nobody need wait for: reading a store may take long."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to the code that waits
            future.set_exception(error)

    threading.Thread(target=run, name="loan-weights", daemon=True).start()
    return asyncio.wrap_future(future)
