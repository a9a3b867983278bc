"""Attributes the failure of a sandbox to us or to the agent, by one rule for every kind of machine.

    it never started, or is paused, or was killed by us                 ours
    the host shows that it failed: its own process died, its memory     ours
    was used up, most of its sandboxes failed together
    its time to live ended while it was not in use                      ours
    everything else                                                     the agent's

From its first action on an agent has files, names, memory and processes in the sandbox, and more ways of
breaking it than can be listed. So the agent is blamed without evidence, and the host only with evidence: a
failure of the host voids the session, and an agent that could fake one would so avoid a failed episode.
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
"""How long to wait after a failure for the end of host processes and for failures of other sandboxes."""
TOGETHER = 3
"""A failure is common if at least so many sandboxes, and half of all, fail within `TOGETHER_S` without a
reason of their own."""
TOGETHER_S = 1.0
_MAX_KEPT = 1024

Value = TypeVar("Value")


@dataclass(frozen=True)
class Evidence:
    """A backend's observations of one of its sandboxes, made anew at each call."""

    is_ours: Callable[[], bool]
    """Whether the agent was not in control: the sandbox is paused, or was killed by us."""
    host_failure: Callable[[], str | None]
    """How the host failed, as far as that can be observed."""
    agents_doing: Callable[[], str | None]
    """How the agent broke it, as far as that can be observed."""
    num_live: Callable[[], int]
    """Number of the backend's sandboxes, including those that failed and were not killed yet."""


class Blame:
    """Judges the failures of one backend's sandboxes."""

    def __init__(self) -> None:
        self._failed_s: OrderedDict[str, float] = OrderedDict()
        """Time of the first failure of each sandbox that no action of the agent explains."""
        self._is_ours: OrderedDict[str, bool] = OrderedDict()
        """The verdict on each failed sandbox, so that further calls to it get the same answer at once."""

    async def judge(self, sandbox: str, error: SandboxError, evidence: Evidence) -> EtudeError:
        """`error` itself if the failure is ours, else a SandboxKilledByAgentError."""
        if evidence.is_ours():
            return error
        if sandbox not in self._is_ours:
            if evidence.agents_doing() is None:
                _remember(self._failed_s, sandbox, monotonic())
            await asyncio.sleep(EVIDENCE_S)
            if evidence.is_ours():
                return error
            _remember(self._is_ours, sandbox, self._is_the_hosts(sandbox, evidence))
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
        # Sessions of one group may do the same thing at the same time: that alone is no failure of the host.
        return together >= TOGETHER and 2 * together >= evidence.num_live()


def _remember(kept: OrderedDict[str, Value], sandbox: str, value: Value) -> None:
    """Stores the first value of a sandbox, and drops the oldest sandboxes beyond `_MAX_KEPT`."""
    kept.setdefault(sandbox, value)
    while len(kept) > _MAX_KEPT:
        kept.popitem(last=False)
