"""What does not hold yet, for each backend. Whoever closes one removes it here: the suite insists.

Each is a reproduction in the table of attempts; the reason says what would close it.
"""

from __future__ import annotations

from tests.sandbox.escape.model import Hole

LOCAL: dict[str, Hole] = {
    "learn where its control group lies on the host": Hole(
        "what is above its group is hidden, but not the group's own name, which is random: the namespace "
        "would have to begin in that group, which a sandbox enters after its start only; to enter first "
        "would take 5 ms, and at times 17 ms",
        users=("root",),
        sometimes=True,
    ),
}

GVISOR: dict[str, Hole] = {}

VM: dict[str, Hole] = {}

HOLES: dict[str, dict[str, Hole]] = {"local": LOCAL, "gvisor": GVISOR, "vm": VM}
"""backend -> attempt -> hole."""
