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

_WARNING = "the unisolated sandbox backend isolates nothing: an agent's code runs with all of your rights"


class UnisolatedBackend(ForkServerBackend):
    """**Not isolated.** Plain processes in temporary folders, for machines without user namespaces.

    Commands and tests have all rights of this user. Only for code that you trust.
    """

    name = "unisolated"
    has_whole_layers = True

    def __init__(self, state: Path | None = None) -> None:
        super().__init__(state)
        warnings.warn(_WARNING, stacklevel=3)
        self.home = str(Path.home())
        self._bases: list[str] = []
        """Base directories of the fork servers; a sandbox may outlive the fork server that created it."""

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities. `network` is False: processes use the host's network."""
        return dataclasses.replace(super().capabilities(), isolation="none", network=False, images=False)

    async def close(self) -> None:
        await super().close()
        while self._bases:
            await asyncio.to_thread(shutil.rmtree, self._bases.pop(), ignore_errors=True)

    def agents_doing(self, sandbox: MachineSandbox) -> str | None:
        """See MachineBackend.agents_doing. The agent's processes can kill the server."""
        return "the sandbox's server was killed while the agent's command ran"

    def host_failure(self, sandbox: MachineSandbox) -> str | None:
        """See MachineBackend.host_failure. Never: the agent's processes can kill the fork server, too."""
        return None

    def _kill_clone(self, clone: Clone) -> None:
        """Nothing: when its channel closes the server ends its processes and removes its folder."""

    def _arguments(self) -> Sequence[str]:
        self._bases.append(tempfile.mkdtemp(prefix="etude-unisolated-"))
        return self._bases[-1:]
