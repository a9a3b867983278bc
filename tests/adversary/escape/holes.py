"""Known holes of each backend. A closed hole must be removed here: the suite fails otherwise.

Each is a reproduction in the table of attempts; the reason says what would close it.
"""

from __future__ import annotations

from tests.adversary.escape.model import Hole

LOCAL: dict[str, Hole] = {}

GVISOR: dict[str, Hole] = {}

VM: dict[str, Hole] = {}

HOLES: dict[str, dict[str, Hole]] = {"local": LOCAL, "gvisor": GVISOR, "vm": VM}
"""backend -> attempt -> hole."""
