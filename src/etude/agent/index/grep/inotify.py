"""Linux' inotify through ctypes: which names in which directories were touched. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from etude.errors import ConfigError, ResourceError

__all__ = ["Event", "Inotify"]

_HEADER = struct.Struct("iIII")
_READ_BYTES = 1 << 16
_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _IS_DIRECTORY = 0x4000, 0x8000, 0x40000000
_ONLY_DIRECTORY, _NO_LINK, _NO_UNLINKED = 0x1000000, 0x2000000, 0x4000000
_MASK = (
    _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
    | _ONLY_DIRECTORY | _NO_LINK | _NO_UNLINKED
)  # fmt: skip
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to the entry `path`."""

    path: bytes
    left: bool
    """It is a directory that is no longer there."""


class Inotify:
    """Watches of directories. Not for several threads."""

    def __init__(self, root: bytes) -> None:
        """Directories are given relative to `root`. Raises ConfigError where the kernel has no inotify."""
        self._root = root
        self._paths: dict[int, bytes] = {}
        self._watches: dict[bytes, int] = {}
        self.overflowed = False
        """Events were lost since this was last set to False."""
        library = ctypes.CDLL(None, use_errno=True)
        try:
            self._add, self._remove, start = (
                library.inotify_add_watch,
                library.inotify_rm_watch,
                library.inotify_init1,
            )
        except AttributeError as error:
            raise ConfigError(
                "this system has no inotify", field="watch", fix="report edits to an overlay instead"
            ) from error
        self._add.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self.descriptor: int = start(_FLAGS)
        if self.descriptor < 0:
            raise _failure(ctypes.get_errno(), "fs.inotify.max_user_instances")

    def watch(self, directory: bytes) -> bool:
        """Watches one directory, not those below it; False if it is gone. Raises ResourceError at a limit."""
        if directory in self._watches:
            return True
        number = self._add(self.descriptor, self._root + b"/" + directory, _MASK)
        if number < 0:
            code = ctypes.get_errno()
            if code in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
                return False
            raise _failure(code, "fs.inotify.max_user_watches")
        if number in self._paths:  # it was moved here, and the event that tells so is still queued
            del self._watches[self._paths[number]]
        self._paths[number] = directory
        self._watches[directory] = number
        return True

    def forget(self, directory: bytes) -> None:
        """Ends the watches of a directory that was moved away or removed, and of all below it."""
        below = directory + b"/"
        for path in [path for path in self._watches if path == directory or path.startswith(below)]:
            number = self._watches.pop(path)
            self._paths.pop(number, None)
            self._remove(self.descriptor, number)  # fails if it ended by itself, which is as good

    def drain(self) -> list[Event]:
        """All events up to now, in order; never waits. The kernel queues an event before the edit returns."""
        events: list[Event] = []
        while True:
            try:
                block = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return events
            for event in self._parse(block):
                events.append(event)
                if event.left:
                    self.forget(event.path)

    def _parse(self, block: bytes) -> Iterator[Event]:
        at = 0
        while at < len(block):
            number, mask, _, length = _HEADER.unpack_from(block, at)
            name = block[at + _HEADER.size : at + _HEADER.size + length].rstrip(b"\0")
            at += _HEADER.size + length
            if mask & _OVERFLOW:
                self.overflowed = True
            directory = self._paths.get(number)
            if mask & _IGNORED and directory is not None:
                del self._paths[number]
                del self._watches[directory]
            elif directory is not None and name:
                path = directory + b"/" + name if directory else name
                yield Event(path, bool(mask & _IS_DIRECTORY and mask & (_MOVED_FROM | _DELETE)))

    def close(self) -> None:
        """Ends all watches."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _failure(code: int, limit: str) -> ConfigError | ResourceError:
    if code in (errno.ENOSPC, errno.EMFILE, errno.ENOMEM):
        return ResourceError(
            "the system allows no more watches",
            field="watch",
            received=os.strerror(code),
            fix=f"raise sysctl {limit}",
        )
    return ConfigError(
        "inotify cannot be used",
        field="watch",
        received=os.strerror(code),
        fix="report edits to an overlay instead",
    )
