"""Whose doing it is that a sandbox failed: one rule for every kind of machine.

    it never started, or it sleeps, or was killed here                  ours
    the host shows that it failed: its own process died, its memory     ours
    was used up, several sandboxes failed together
    everything else                                                     the agent's

From its first action on an agent has files, names, memory and processes in the sandbox, and more ways of
breaking it than anybody can list. So no evidence is asked for against the agent. It is asked for against the
host: what an agent could make look like a failure of the host would void its session, and with it a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from etude.errors import EtudeError, SandboxError
from etude.sandbox.errors import SandboxKilledByAgentError

EVIDENCE_S = 0.25
"""How long after a failure the host's own processes, and the failures of neighbours, are waited for."""
TOGETHER = 3
"""So many sandboxes that fail within `TOGETHER_S`, none for a reason of its own, are the host's failure."""
TOGETHER_S = 1.0
_MAX_KEPT = 1024


class Blame:
    """Judges the failures of one backend's sandboxes."""

    def __init__(self) -> None:
        self._failed_s: OrderedDict[str, float] = OrderedDict()
        """When each sandbox failed first that no evidence explains."""

    async def judge(
        self,
        sandbox: str,
        error: SandboxError,
        is_ours: Callable[[], bool],
        host_failure: Callable[[], str | None],
        agents_doing: Callable[[], str | None],
    ) -> EtudeError:
        """`error` itself where the failure is ours, else what the agent did.

        `is_ours`: whether the sandbox was not in the agent's hands. `host_failure`: how the host failed, as
        far as it shows; `agents_doing`: how the agent broke its sandbox, as far as that shows.
        """
        if is_ours():
            return error
        if agents_doing() is None:
            self._failed_s.setdefault(sandbox, time.monotonic())
        while len(self._failed_s) > _MAX_KEPT:
            self._failed_s.popitem(last=False)
        await asyncio.sleep(EVIDENCE_S)
        if is_ours() or host_failure() is not None:
            return error
        cause = agents_doing()
        if cause is None and self._num_together(sandbox) >= TOGETHER:
            return error
        return SandboxKilledByAgentError(cause or error.message, field="sandbox", received=sandbox)

    def _num_together(self, sandbox: str) -> int:
        failed_s = self._failed_s.get(sandbox, 0.0)
        return sum(abs(other_s - failed_s) <= TOGETHER_S for other_s in self._failed_s.values())
