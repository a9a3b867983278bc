"""Whose doing it is that a sandbox failed: one rule for every kind of machine.

    it never started, or it sleeps, or was killed here                  ours
    the host shows that it failed: its own process died, its memory     ours
    was used up, most of its sandboxes failed together
    its time to live ended while nobody asked for anything              ours
    everything else                                                     the agent's

From its first action on an agent has files, names, memory and processes in the sandbox, and more ways of
breaking it than anybody can list. So no evidence is asked for against the agent. It is asked for against the
host: what an agent could make look like a failure of the host would void its session, and with it a failure.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from etude.errors import EtudeError, SandboxError
from etude.sandbox.errors import SandboxKilledByAgentError

EVIDENCE_S = 0.25
"""How long after a failure the host's own processes, and the failures of neighbours, are waited for."""
TOGETHER = 3
"""So many sandboxes at least, and half of all, fail together if they do within `TOGETHER_S`, and none for a
reason of its own."""
TOGETHER_S = 1.0
_MAX_KEPT = 1024

Value = TypeVar("Value")


@dataclass(frozen=True)
class Evidence:
    """What a backend can say of one of its sandboxes, each time that it is asked."""

    is_ours: Callable[[], bool]
    """Whether it was not in the agent's hands: it sleeps, or was killed here."""
    host_failure: Callable[[], str | None]
    """How the host failed it, as far as that shows."""
    agents_doing: Callable[[], str | None]
    """How the agent broke it, as far as that shows."""
    num_live: Callable[[], int]
    """The sandboxes of the backend, those that failed and were not killed yet among them."""


class Blame:
    """Judges the failures of one backend's sandboxes."""

    def __init__(self) -> None:
        self._failed_s: OrderedDict[str, float] = OrderedDict()
        """When each sandbox failed first that nothing the agent did explains."""
        self._is_ours: OrderedDict[str, bool] = OrderedDict()
        """How each failed sandbox was judged: further calls to a dead one get the same answer, at once."""

    async def judge(self, sandbox: str, error: SandboxError, evidence: Evidence) -> EtudeError:
        """`error` itself where the failure is ours, else what the agent did."""
        if evidence.is_ours():
            return error
        if sandbox not in self._is_ours:
            if evidence.agents_doing() is None:
                _keep(self._failed_s, sandbox, monotonic())
            await asyncio.sleep(EVIDENCE_S)
            if evidence.is_ours():
                return error
            _keep(self._is_ours, sandbox, self._is_the_hosts(sandbox, evidence))
        if self._is_ours[sandbox]:
            return error
        cause = evidence.agents_doing() or error.message
        return SandboxKilledByAgentError(cause, field="sandbox", received=sandbox)

    def _is_the_hosts(self, sandbox: str, evidence: Evidence) -> bool:
        if evidence.host_failure() is not None:
            return True
        if evidence.agents_doing() is not None:
            return False
        failed_s = self._failed_s.get(sandbox, monotonic())
        together = sum(abs(other_s - failed_s) <= TOGETHER_S for other_s in self._failed_s.values())
        # Sessions of one group may try the same thing at the same time: that alone is no failure of a host.
        return together >= TOGETHER and 2 * together >= evidence.num_live()


def _keep(kept: OrderedDict[str, Value], sandbox: str, value: Value) -> None:
    """The first value of a sandbox; of many sandboxes the last ones."""
    kept.setdefault(sandbox, value)
    while len(kept) > _MAX_KEPT:
        kept.popitem(last=False)
