"""What keeps gVisor from working on this machine, and how to mend it."""

from __future__ import annotations

import sys
from pathlib import Path

from etude.errors import ResourceError
from etude.sandbox.gvisor.runsc import Runsc
from etude.sandbox.inside.kernel import MACHINE, MACHINES

_SYSCTL = Path("/proc/sys")
_OBSTACLES = (
    (
        "user/max_user_namespaces",
        "0",
        "user namespaces are switched off: sysctl -w user.max_user_namespaces=10000",
    ),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "unprivileged user namespaces are switched off: sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor refuses user namespaces to plain users: "
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
"""Also for root, who gives itself up before it makes a user namespace."""


def find_problems(program: str = "runsc", sysctl: Path = _SYSCTL) -> list[str]:
    """One line for each obstacle: what is wrong, then the command that mends it."""
    if sys.platform != "linux":
        return ["gVisor needs Linux: use the unisolated backend for code that you trust"]
    problems: list[str] = []
    if MACHINE not in MACHINES:
        problems.append(f"no system-call table for {MACHINE}: use x86_64 or aarch64")
    try:
        Runsc.find(program)
    except ResourceError as error:
        problems.append(f"{error.message}: {error.fix}")
    problems += [message for name, value, message in _OBSTACLES if _read(sysctl / name) == value]
    scope = _read(sysctl / "kernel/yama/ptrace_scope")
    if scope is not None and scope.isdigit() and int(scope) > 1:
        problems.append(
            f"ptrace is forbidden (ptrace_scope {scope}), which systrap begins with: "
            "sysctl -w kernel.yama.ptrace_scope=1"
        )
    return problems


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
