"""Deadlines that do not count the time for which a command waited for a processor or a disk.

On a machine that does too much, tests would else run out of time for what other sandboxes compute: the agent
would hear that they hang, and be judged by it. So a command ends at its deadline if all that it started
sleeps, or has had as much processor time as it may take; what still wants to run goes on for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

from etude.sandbox.inside.processes import Process

MOST_WAITING_S = 60.0
"""How long a command may go on after its deadline."""
_SHORTEST_S, _LONGEST_S = 0.02, 0.1
"""Bounds of the time between two looks."""
_WANTS_TO_RUN = "RD"
"""States of processes that compute, wait for a processor, or wait for a disk."""


def extension_s(
    processes: Iterable[Process], timeout_s: float, lasted_s: float, before_s: float = 0.0
) -> float:
    """After how many seconds to look again at a command that has lasted its time; 0: it ends now.

    `processes`: the command's. `before_s`: processor time that they had used when it began.
    """
    rows = list(processes)
    left_s = timeout_s + before_s - sum(row.processor_s for row in rows)
    waits = left_s > 0 and any(row.state in _WANTS_TO_RUN for row in rows)
    if not waits or lasted_s >= timeout_s + MOST_WAITING_S:
        return 0.0
    return min(max(left_s, _SHORTEST_S), _LONGEST_S)
