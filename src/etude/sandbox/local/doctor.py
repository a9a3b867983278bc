"""Diagnosis: what prevents namespaces on this machine, and how to correct it."""

from __future__ import annotations

import sys
from pathlib import Path

from etude.sandbox.inside.kernel import MACHINE, MACHINES

_SYSCTL = Path("/proc/sys")


def find_problems(sysctl: Path = _SYSCTL) -> list[str]:
    """One line for each problem: what is wrong, then the command that corrects it.

    Restrictions of plain users hold for root as well, which becomes `nobody` before it makes namespaces.
    """
    if sys.platform != "linux":
        return ['the local sandbox needs Linux: set sandbox.backend = "unisolated" for code that you trust']
    problems: list[str] = []
    if MACHINE not in MACHINES:
        problems.append(f"no system-call table for {MACHINE}: use x86_64 or aarch64")
    if _read(sysctl / "user/max_user_namespaces") == "0":
        problems.append("user namespaces are switched off: sysctl -w user.max_user_namespaces=10000")
    if _read(sysctl / "kernel/unprivileged_userns_clone") == "0":
        problems.append(
            "unprivileged user namespaces are switched off: sysctl -w kernel.unprivileged_userns_clone=1"
        )
    if _read(sysctl / "kernel/apparmor_restrict_unprivileged_userns") == "1":
        problems.append(
            "AppArmor refuses user namespaces to plain users, and sandboxes are made by one even for root: "
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    return problems


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
