"""Several copies that start at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from etude.errors import SandboxError
from etude.sandbox.interface import Sandbox


async def gather_copies(starting: Sequence[Awaitable[Sandbox]]) -> list[Sandbox | SandboxError]:
    """Each copy, or the error that prevented it; anything but a SandboxError is raised.

    Then, and when the caller is cancelled, the copies that did start are killed: nobody would ever know.
    """
    tasks = [asyncio.ensure_future(copy) for copy in starting]
    try:
        copies = await asyncio.gather(*tasks, return_exceptions=True)
        result: list[Sandbox | SandboxError] = []
        for copy in copies:
            if isinstance(copy, BaseException) and not isinstance(copy, SandboxError):
                raise copy
            result.append(copy)
    except BaseException:
        started = [
            task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception()
        ]
        await asyncio.shield(asyncio.gather(*(copy.kill() for copy in started)))
        raise
    return result
