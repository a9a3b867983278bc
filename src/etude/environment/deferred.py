"""A sandbox that is still being made: whoever uses it first waits for it.

The agent's first message needs no sandbox, so sampling and the making of sandboxes overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from etude.errors import SandboxError
from etude.sandbox.interface import Sandbox
from etude.sandbox.wrapping import WrappedSandbox


class DeferredSandbox(WrappedSandbox):
    """Implements Sandbox. Errors of the making are raised by the first use."""

    def __init__(self, making: Coroutine[Any, Any, Sandbox]) -> None:
        """Begins to make the sandbox at once; needs a running event loop."""
        super().__init__("pending")
        self._making = asyncio.create_task(making)

    @property
    def id(self) -> str:
        """The sandbox's id; `pending` until it is there."""
        return self._making.result().id if self._making.done() else "pending"

    async def ready(self) -> Sandbox:
        """The sandbox itself. Raises SandboxError if it could not be made."""
        return await asyncio.shield(self._making)

    async def reach(self, operation: str) -> Sandbox:
        return await self.ready()

    async def kill(self) -> None:
        """See Sandbox.kill. A sandbox that could not be made has nothing to kill."""
        with contextlib.suppress(SandboxError):
            await (await self.ready()).kill()
