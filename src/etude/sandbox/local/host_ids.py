"""Spare user and group ids of the host, so that each sandbox is a user of its own."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.inside.ids import BLOCK, SpareIds

_FIRST, _LAST = 0x7000_0000, 0x7FFC_FFFF
"""A range that is unassigned in systemd's list (UIDS-GIDS)."""
BUILD_IDS = _LAST + 1
"""First of 65,536 more ids, for the users of image builds."""
_KERNEL = (6, 3)
"""The first kernel version with idmapped mounts of tmpfs."""
_MAPS = ("uid_map", "gid_map")


@dataclass(frozen=True)
class HostIds:
    """Spare ids, or the reason why there are none."""

    spare: SpareIds | None
    reason: str = ""


def find_host_ids(
    euid: int | None = None,
    etc: Path = Path("/etc"),
    proc: Path = Path("/proc/self"),
    release: str | None = None,
    path: str | None = None,
) -> HostIds:
    """The ids that this process may give to sandboxes. Reads files, changes nothing.

    `release`: of the kernel; `path`: where to search programs (None: PATH).
    """
    uid = os.geteuid() if euid is None else euid
    numbers = re.findall(r"\d+", release or platform.release())[:2]
    if tuple(map(int, numbers)) < _KERNEL:
        return HostIds(None, f"the kernel is older than Linux {_KERNEL[0]}.{_KERNEL[1]}")
    if uid == 0:
        if all(_is_mapped(proc / name, _FIRST, _LAST - _FIRST + 1) for name in _MAPS):
            return HostIds(SpareIds(_FIRST, _FIRST, _LAST - _FIRST + 1))
        return HostIds(None, f"this container has no ids {_FIRST} to {_LAST}: map them into it")
    programs = [shutil.which(name, path=path) for name in ("newuidmap", "newgidmap")]
    if None in programs:
        return HostIds(None, "newuidmap is missing: install the package uidmap")
    if "NoNewPrivs:\t1\n" in (proc / "status").read_text():
        return HostIds(None, "newuidmap gains no rights here: start without no_new_privs")
    ranges = [_find_range(etc / name, uid) for name in ("subuid", "subgid")]
    if None in ranges:
        fix = (
            f"usermod --add-subuids FIRST-LAST --add-subgids FIRST-LAST, of {BLOCK} ids for each fork server"
        )
        return HostIds(None, f"/etc/subuid and /etc/subgid have too few ids for this user: {fix}")
    found_ranges = [row for row in ranges if row is not None]
    for name, (first, num) in zip(_MAPS, found_ranges, strict=True):
        if not _is_mapped(proc / name, first, num):
            return HostIds(None, f"this container has no ids {first} to {first + num - 1}: map them into it")
    (first_uid, num_uids), (first_gid, num_gids) = found_ranges
    found = tuple(program for program in programs if program is not None)
    return HostIds(SpareIds(first_uid, first_gid, min(num_uids, num_gids), found))


def _is_mapped(file: Path, wanted: int, num_wanted: int) -> bool:
    rows = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    return any(first <= wanted and first + num >= wanted + num_wanted for first, _, num in rows)


def _find_range(file: Path, uid: int) -> tuple[int, int] | None:
    """(first id, number of ids) of the largest range of a user; None below one block."""
    names = {str(uid)}
    with contextlib.suppress(KeyError):  # a user without a name
        names.add(pwd.getpwuid(uid).pw_name)
    rows = [line.split(":") for line in file.read_text().splitlines()] if file.is_file() else []
    sizes = [(int(row[1]), int(row[2])) for row in rows if len(row) == 3 and row[0] in names]
    return max((row for row in sizes if row[1] >= BLOCK), key=lambda row: row[1], default=None)
