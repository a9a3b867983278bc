"""The table of attempts."""

from __future__ import annotations

from tests.adversary.escape.attempts_bombs import BOMBS
from tests.adversary.escape.attempts_calls import CALLS
from tests.adversary.escape.attempts_host import HOST
from tests.adversary.escape.attempts_kernel import KERNEL
from tests.adversary.escape.attempts_lasting import LASTING
from tests.adversary.escape.attempts_memory import MEMORY
from tests.adversary.escape.attempts_processes import PROCESSES
from tests.adversary.escape.attempts_rights import RIGHTS
from tests.adversary.escape.attempts_sharing import SHARING
from tests.adversary.escape.attempts_snapshots import SNAPSHOTS
from tests.adversary.escape.attempts_starvation import STARVATION
from tests.adversary.escape.model import Attempt

GROUPS: dict[str, list[Attempt]] = {
    "The host's files, settings and devices": HOST,
    "The kernel's administrative and rarely audited calls": KERNEL,
    "Processes, sockets, memory: of the host, of the server, of a neighbour": PROCESSES,
    "Rights that were given up": RIGHTS,
    "Bombs": BOMBS,
    "Memory of the kernel's that no process holds": MEMORY,
    "What is shared": STARVATION,
    "What a neighbour shows": SHARING,
    "Outlasting an end, being ahead of a look": LASTING,
    "Through the owner's calls": CALLS,
    "By hostile snapshots": SNAPSHOTS,
}
ATTEMPTS: dict[str, Attempt] = {attempt.name: attempt for group in GROUPS.values() for attempt in group}
