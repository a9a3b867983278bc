"""The fork server without isolation, for machines that forbid user namespaces."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from etude.sandbox.local.backend import Clone, ForkServerBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.types import Capabilities

_WARNING = "the unisolated sandbox backend keeps nothing apart: an agent's code runs with all of your rights"


class UnisolatedBackend(ForkServerBackend):
    """**Not isolated.** Plain processes in temporary folders, for machines without user namespaces.

    Commands and tests have every right of this user. Only for code that you trust.
    """

    name = "unisolated"
    has_whole_layers = True

    def __init__(self, state: Path | None = None) -> None:
        super().__init__(state)
        warnings.warn(_WARNING, stacklevel=3)
        self._bases: list[str] = []
        """Of each fork server; a sandbox outlives the one that made it."""

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities. Its processes are on the host's network already."""
        return dataclasses.replace(super().capabilities(), isolation="none", network=False, images=False)

    async def close(self) -> None:
        await super().close()
        while self._bases:
            await asyncio.to_thread(shutil.rmtree, self._bases.pop(), ignore_errors=True)

    def agents_doing(self, sandbox: MachineSandbox) -> str | None:
        """See MachineBackend.agents_doing. Its processes can reach everything of ours."""
        return "the sandbox's server was killed while the agent's command ran"

    def host_failure(self, sandbox: MachineSandbox) -> str | None:
        """See MachineBackend.host_failure. Its processes can end the fork server as well."""
        return None

    def _end(self, clone: Clone) -> None:
        """Nothing: the closed channel lets the server end its processes and remove its folder."""

    def _arguments(self) -> Sequence[str]:
        self._bases.append(tempfile.mkdtemp(prefix="etude-unisolated-"))
        return self._bases[-1:]
