"""Dropping rights: changing the user, and entering a new user namespace."""

from __future__ import annotations

import os
from collections.abc import Callable

from etude.sandbox.inside import kernel

NOBODY = 65534
"""User of the real root before it creates a user namespace, so that id 0 of the host is never mapped."""


def change_user(uid: int, gid: int) -> None:
    """Changes user and group of this process permanently, without other groups. Raises OSError."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def enter_own_namespaces(
    build_mounts: Callable[[], None], map_ids: Callable[[int, int], None] | None = None
) -> None:
    """Moves this process into a new user and mount namespace, as root; to the host it is a plain user.
    `build_mounts` sets up its file system; `map_ids` maps its uid and gid on the host (None: to 0).

    The real root mounts with its own rights, since the sources may be in directories that other users may not
    enter, and then drops them.
    """
    map_ids = map_ids or (lambda uid, gid: kernel.write_maps(0, uid, gid))
    if os.geteuid() == 0:
        kernel.unshare(kernel.NEWNS)
        build_mounts()
        change_user(NOBODY, NOBODY)
        # Changing ids made /proc/self owned by root, and the maps unwritable.
        kernel.set_dumpable(True)
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        map_ids(NOBODY, NOBODY)
    else:
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        map_ids(uid, gid)
        build_mounts()
