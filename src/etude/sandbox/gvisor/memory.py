"""How much memory a container uses, and when that is too much.

What its programs and its files hold lies in one memory file of gVisor's kernel, whose size the host can
read; what they make that kernel hold itself (messages, buffers of sockets, names of files) is its private
memory. `MemoryBound` judges both. In a control group the host's kernel bounds all of it together.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

OVERHEAD_BYTES = 256 << 20
"""What gVisor's kernel, its file server and the program inside may use beside the agent's programs."""
_MEMORY_FILE = "/memfd:runsc-memory"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryFile:
    """The memory file of one running container."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, pid: int) -> MemoryFile | None:
        """That of the gVisor kernel with this process id; None if it has ended or cannot be looked into."""
        try:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                if str(path.readlink()).startswith(_MEMORY_FILE):
                    return cls(path)
        except OSError:
            # It has ended, or closed a descriptor meanwhile: the caller asks again.
            return None
        return None

    def used_bytes(self) -> int:
        """What programs and files inside hold now; 0 once the container has ended."""
        try:
            return self._path.stat().st_blocks * 512
        except OSError:
            return 0

    def kernel_bytes(self) -> int:
        """What gVisor's kernel holds beside its memory file; 0 once it has ended."""
        try:
            _, resident, shared, *_ = (self._path.parents[1] / "statm").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * _PAGE_BYTES


SERVER_BYTES = 16 << 20
"""What the program inside holds itself: 9 to 12 MiB were seen."""
KERNEL_BYTES = 96 << 20
"""What gVisor's kernel may hold beside: 10 MiB at the start; 58 MiB with 20,000 files."""
STEP_BYTES = 16 << 20
"""By how much memory must grow to count as growing."""
PATIENCE_S = 2.0
"""How long a container may stay over a limit after its programs were ended."""
SHORTEST_S, LONGEST_S = 0.05, 0.25
"""Bounds of the time between two looks."""
_FASTEST_BYTES_PER_S = 2 << 30
"""How fast programs are taken to fill memory; 1.1 GiB/s was seen on two cores."""

Verdict = Literal["within", "over", "waiting", "hopeless"]
"""`over`: end the agent's processes now. `waiting`: that was done, and may need a moment."""


class MemoryBound:
    """The limits of one container, and how long it has exceeded them.

        within the limits     nothing is done
        over one of them      the agent's processes are killed
        still over, later     the sandbox ends: what its files hold nobody else can free

    gVisor's kernel gives back late what it has freed: up to `OVERHEAD_BYTES` it is tolerated, as long as it
    does not grow further. The watch looks as often as the room that is left demands.
    """

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: of programs and files together."""
        self.pause_s = LONGEST_S
        """When to look again."""
        self._programs_bytes = limit_bytes + SERVER_BYTES
        self._usual_bytes = self._programs_bytes + KERNEL_BYTES
        self._most_bytes = limit_bytes + OVERHEAD_BYTES
        self._tolerated_bytes = self._usual_bytes
        self._since_s: float | None = None
        self._seen_bytes = 0

    def look(self, programs_bytes: int, kernel_bytes: int, now_s: float) -> Verdict:
        """Judges what is held now."""
        total_bytes = programs_bytes + kernel_bytes
        # Once the kernel has given something back, it may not grow into it again.
        self._tolerated_bytes = max(self._usual_bytes, min(self._tolerated_bytes, total_bytes + STEP_BYTES))
        room_bytes = min(self._programs_bytes - programs_bytes, self._tolerated_bytes - total_bytes)
        self.pause_s = min(LONGEST_S, max(SHORTEST_S, room_bytes / _FASTEST_BYTES_PER_S))
        if room_bytes >= 0:
            self._since_s = None
            return "within"
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > PATIENCE_S:
            return self._after_patience(programs_bytes, total_bytes)
        elif total_bytes <= self._seen_bytes + STEP_BYTES:
            return "waiting"
        self._seen_bytes = total_bytes
        return "over"

    def _after_patience(self, programs_bytes: int, total_bytes: int) -> Verdict:
        if programs_bytes > self._programs_bytes or total_bytes > self._most_bytes:
            return "hopeless"
        self._tolerated_bytes = total_bytes + STEP_BYTES
        self._since_s = None
        return "within"
