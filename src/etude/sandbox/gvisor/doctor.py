"""What keeps gVisor from working on this machine, and how to mend it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from etude.errors import ResourceError
from etude.sandbox.gvisor.runsc import Runsc
from etude.sandbox.local import doctor

_SYSCTL = Path("/proc/sys")


def find_problems(program: str = "runsc", sysctl: Path = _SYSCTL) -> list[str]:
    """One line for each obstacle: what is wrong, then the command that mends it."""
    if sys.platform != "linux":
        return ["gVisor needs Linux: use the unisolated backend for code that you trust"]
    problems = doctor.find_problems(sysctl)
    try:
        Runsc.find(program)
    except ResourceError as error:
        problems.append(f"{error.message}: {error.fix}")
    scope = ""
    with contextlib.suppress(OSError):
        scope = (sysctl / "kernel/yama/ptrace_scope").read_text().strip()
    if scope.isdigit() and int(scope) > 1:
        problems.append(
            f"ptrace is forbidden (ptrace_scope {scope}), which systrap begins with: "
            "sysctl -w kernel.yama.ptrace_scope=1"
        )
    return problems
