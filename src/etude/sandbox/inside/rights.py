"""Giving up rights: becoming another user, and moving into a user namespace of one's own."""

from __future__ import annotations

import os
from collections.abc import Callable

from etude.sandbox.inside import kernel

NOBODY = 65534
"""What the real root becomes before it makes a user namespace: id 0 of the host is never mapped."""


def become(uid: int, gid: int) -> None:
    """Takes on a user and its one group for good. Raises OSError."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def enter_own_namespaces(
    furnish: Callable[[], None], map_ids: Callable[[int, int], None] | None = None
) -> None:
    """Moves this process into a user and a mount namespace of its own, where it has root's rights and is, to
    the host, a plain user. `furnish` makes its file system; `map_ids` gives it its ids, for those that it has
    on the host (None: 0).

    The real root furnishes with its own rights, since what it binds may lie where nobody else may enter, and
    then gives them up.
    """
    map_ids = map_ids or (lambda uid, gid: kernel.write_maps(0, uid, gid))
    if os.geteuid() == 0:
        kernel.unshare(kernel.NEWNS)
        furnish()
        become(NOBODY, NOBODY)
        # Changing ids made /proc/self the property of root, and the maps unwritable.
        kernel.set_dumpable(True)
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        map_ids(NOBODY, NOBODY)
    else:
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        map_ids(uid, gid)
        furnish()
