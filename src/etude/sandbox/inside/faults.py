"""Faults: answers to impossible requests of the agent, as opposed to failures of our own.

A fault is sent to the owner as (kind, message); `errors.fault_error` turns it into the typed error. All
backends use these texts, so that an agent reads the same messages everywhere.
"""

from __future__ import annotations

import errno

MISSING = ("missing", "no such file or directory")
IS_DIRECTORY = ("kind", "is a directory")
NOT_DIRECTORY = ("kind", "not a directory")
NOT_REGULAR = ("kind", "not a regular file")
PART_IS_FILE = ("kind", "a part of the path is a file")
OUTSIDE = ("outside", "the path leaves the workspace")
ROOT_STAYS = ("argument", "the workspace itself stays")
DISK_FULL = ("disk", "no space left in the sandbox")
FILE_TOO_LARGE = ("disk", "the file exceeds the sandbox's limit for one file")
SLOW_PATTERN = ("argument", "the search took too long: use a simpler pattern")
DIFF_TOO_LARGE = ("diff", "the changes are too large to carry")
ANSWER_TOO_LARGE = ("argument", "the answer is too large: name a smaller part")
TOO_MANY_OPEN = ("argument", "too many files or commands are open in the sandbox")
TOO_DEEP = ("argument", "the directories are nested too deeply")
NOT_PERMITTED = ("argument", "permission denied")


class Fault(Exception):
    """An impossible request of the agent; `kind` selects the error class outside."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        self.message = message
        super().__init__(kind, message)


_BY_ERRNO = {
    errno.ENOENT: MISSING,
    errno.EISDIR: IS_DIRECTORY,
    errno.ENOTDIR: PART_IS_FILE,
    errno.EEXIST: PART_IS_FILE,
    errno.ENXIO: NOT_REGULAR,
    errno.ELOOP: OUTSIDE,
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: DISK_FULL,
    errno.EFBIG: FILE_TOO_LARGE,
    errno.EMFILE: TOO_MANY_OPEN,
    errno.ENAMETOOLONG: TOO_DEEP,
    errno.EACCES: NOT_PERMITTED,
    errno.EPERM: NOT_PERMITTED,
}


def from_os_error(error: OSError) -> Fault:
    """The fault for a failed system call on the agent's files."""
    known = _BY_ERRNO.get(error.errno or 0)
    return Fault(*known) if known else Fault("argument", error.strerror or str(error))
