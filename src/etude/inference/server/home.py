"""The weights that a replica serves to users: kept in host memory while it is lent, restored afterwards.

at home   administrator ──stage, activate──> engine
lent      administrator ──stage, activate──> host memory ──restore()──> engine
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

    def fetch(self, manifest: WeightManifest, /) -> Mapping[str, Tensor]: ...

    async def stage(self, manifest: WeightManifest, tensors: Mapping[str, Tensor] | None = None) -> None: ...

    def usage(self) -> Mapping[str, float]: ...


class HomeWeights:
    """Implements WeightSink for administrators: a version that they activate while the replica is lent comes
    into service when the loan ends. For one event loop."""

    def __init__(self, engine: LendableEngine, manifest: WeightManifest) -> None:
        """`manifest`: of the weights in service."""
        self.is_lent = False
        """Whether the replica is lent."""
        self.swap_lock = asyncio.Lock()
        """Held while weights are staged or activated in the engine."""
        self.trouble = ""
        """Why the users' weights could not be restored, while that is retried."""
        self._engine, self._manifest = engine, manifest
        self._tensors: Mapping[str, Tensor] | None = None
        """Tensors of the manifest, while the replica is lent."""
        self._next: WeightManifest | None = None
        """The version that an administrator has staged."""
        self._is_staged = False
        """Whether it is staged in the engine itself."""

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage. While the replica is lent the weights are only fetched and checked."""
        async with self.swap_lock:
            if self.is_lent:
                await in_thread(lambda: self._engine.fetch(manifest))
            else:
                await self._engine.stage(manifest)
            self._next, self._is_staged = manifest, not self.is_lent

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. While the replica is lent, sets the version to restore."""
        async with self.swap_lock:
            staged = check_staged(version, self._next)
            tensors: Mapping[str, Tensor] | None = None
            if self.is_lent:
                tensors = await in_thread(lambda: self._engine.fetch(staged))
            else:
                if not self._is_staged:  # it was lent then
                    await self._engine.stage(staged)
                await self._engine.activate(version, kv)
            self._manifest, self._tensors, self._next = staged, tensors, None

    def current(self) -> PolicyVersion | None:
        """See WeightSink.current: the users' version; None while they are not served."""
        return None if self.is_lent else self._engine.current()

    # ---- loans ----------------------------------------------------------------------------------

    async def begin_loan(self) -> None:
        """Copies the users' weights to host memory: from now on the engine is the borrower's.

        Raises WeightUpdateError if they cannot be fetched, LoanConflictError if the replica is lent already;
        then nothing has changed.
        """
        async with self.swap_lock:
            if self.is_lent:
                raise LoanConflictError("the replica has just been lent", field="state", fix="recall it")
            self._tensors = await in_thread(lambda: self._engine.fetch(self._manifest))
            self.is_lent, self._is_staged = True, False

    async def restore(self) -> bool:
        """Puts the users' weights back into service; False, with `trouble` set, on failure. `swap_lock` must
        be held."""
        try:
            await self._engine.stage(self._manifest, self._tensors)
            await self._engine.activate(self._manifest.version, "recompute")
        except Exception as error:  # any exception: users must not be served the run's weights
            self.trouble = f"{self._manifest.version} could not be restored: {error}"
            _log.error("%s", self.trouble, exc_info=error)
            return False
        self.trouble = ""
        return True

    def end_loan(self) -> None:
        """Ends the loan: the engine serves the users' weights again."""
        self.is_lent, self._tensors = False, None


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a daemon thread, which may outlive the caller: reading a store can take long."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to the code that waits
            future.set_exception(error)

    threading.Thread(target=run, name="loan-weights", daemon=True).start()
    return asyncio.wrap_future(future)
