"""What does not hold yet, for each backend. Whoever closes one removes it here: the suite insists.

Each is a reproduction in the table of attempts; the reason says what would close it.
"""

from __future__ import annotations

from tests.sandbox.escape.model import Hole

LOCAL: dict[str, Hole] = {
    "learn where its control group lies on the host": Hole(
        "the namespace is made before the first process is in its groups, so that their paths are in "
        "/proc/self/cgroup. Enter the groups first, then unshare the control group namespace",
        users=("root",),
    ),
    "start before the limits are set": Hole(
        "a spawned command gets RLIMIT_NOFILE and RLIMIT_CPU by prlimit once it runs already: what it starts "
        "before has neither, ever. Begin the command's text with a line `ulimit -n N; ulimit -t S`, or spawn "
        "through a helper that sets them",
    ),
    "use up every descriptor in flight": Hole(
        "as long as commands can start before their limits are set, they may have as many in flight as "
        "pid 1. "
        "Have the fork server open /proc/<pid>/fd/<disk> of a sandbox, or lend the disk once, with the "
        "first answer",
        sometimes=True,
    ),
    "open descriptors without end": Hole("see: start before the limits are set", sometimes=True),
    "burn processor time without end": Hole("see: start before the limits are set", sometimes=True),
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
