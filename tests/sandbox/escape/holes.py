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

_SENTRY = (
    "the sentry keeps it in its own memory, which nothing bounds without control groups; with them "
    "the kernel kills the sentry, and the infrastructure is blamed"
)

GVISOR: dict[str, Hole] = {
    "fill memory in many processes": Hole(_SENTRY, sometimes=True),
    "fill memory through a shared mapping": Hole(_SENTRY, sometimes=True),
    "fill memory with memfds": Hole(_SENTRY, sometimes=True),
    "fill memory with System V segments": Hole(_SENTRY, sometimes=True),
    "fill kernel memory with message queues": Hole(_SENTRY, sometimes=True),
    "fill kernel memory with local sockets": Hole(_SENTRY, sometimes=True),
    "fill kernel memory with TCP connections": Hole(_SENTRY, sometimes=True),
    "burn processor time without end": Hole("this gVisor does not keep RLIMIT_CPU: bound it by the timeout"),
}

VM: dict[str, Hole] = {
    "burn processor time without end": Hole("as on local: start before the limits are set", sometimes=True),
    "fill kernel memory with message queues": Hole(
        "the guest's kernel ends the server for want of memory, and the infrastructure is blamed: shield "
        "the server (oom_score_adj), and bound kernel.msgmni, kernel.shmall and the like in the guest",
        sometimes=True,
    ),
}

HOLES: dict[str, dict[str, Hole]] = {"local": LOCAL, "gvisor": GVISOR, "vm": VM}
"""backend -> attempt -> hole."""
