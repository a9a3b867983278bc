"""What does not hold yet, for each backend. Whoever closes one removes it here: the suite insists.

Each is a reproduction in the table of attempts; the reason says what would close it.
"""

from __future__ import annotations

from tests.sandbox.escape.model import Hole

LOCAL: dict[str, Hole] = {
    "learn where its control group lies on the host": Hole(
        "the namespace is made before the first process is in its groups, so that their paths are in "
        "/proc/self/cgroup: an opaque name and a number. Entering first would cost each start some ten "
        "milliseconds",
        users=("root",),
    ),
    "use up every pending signal": Hole(
        "each sandbox has a limit of its own, but the kernel counts for the host's user as well: what "
        "another sandbox without that limit takes (the control, beside it) is missing here",
        sometimes=True,
    ),
    "fill kernel memory with TCP connections": Hole(
        "without control groups nothing counts the buffers of sockets: fewer descriptors and processes "
        "are the only "
        "bound. Say so in the docs",
        without_groups_only=True,
    ),
    "fill kernel memory with local sockets": Hole("as with TCP connections", without_groups_only=True),
}

GVISOR: dict[str, Hole] = {}

VM: dict[str, Hole] = {}

HOLES: dict[str, dict[str, Hole]] = {"local": LOCAL, "gvisor": GVISOR, "vm": VM}
"""backend -> attempt -> hole."""
