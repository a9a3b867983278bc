"""What does not hold yet, for each backend. Whoever closes one removes it here: the suite insists.

Each is a reproduction in the table of attempts; the reason says what would close it.
"""

from __future__ import annotations

from tests.adversary.escape.model import Hole

LOCAL: dict[str, Hole] = {}

GVISOR: dict[str, Hole] = {}

VM: dict[str, Hole] = {}

HOLES: dict[str, dict[str, Hole]] = {"local": LOCAL, "gvisor": GVISOR, "vm": VM}
"""backend -> attempt -> hole."""
