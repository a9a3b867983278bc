"""Going through a tree that the agent made: by descriptors, never by paths, of any depth."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

OPAQUE = "user.overlay.opaque"
"""Attribute of a directory that hides what lies below it in an overlay."""
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class Folder:
    """A directory that is being gone through."""

    descriptor: int
    prefix: str
    """Its path with a slash at the end; empty for the uppermost."""
    status: os.stat_result
    copy: int = -1
    names: list[str] = field(default_factory=list)
    """What is still to be seen, last one first."""

    def __post_init__(self) -> None:
        self.names = sorted(os.listdir(self.descriptor), reverse=True)

    def enter(self, name: str, status: os.stat_result, copy: int = -1) -> Folder:
        """The directory `name` below. Raises OSError."""
        inner = os.open(name, DIRECTORY_FLAGS, dir_fd=self.descriptor)
        return Folder(inner, f"{self.prefix}{name}/", status, copy)

    def close(self) -> None:
        """Closes its descriptors."""
        os.close(self.descriptor)
        if self.copy >= 0:
            os.close(self.copy)


def attributes(name: str, folder: int) -> list[str]:
    """The extended attributes of a directory; none where the file system has none. Raises OSError."""
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=folder)
    try:
        return os.listxattr(descriptor)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return []
    finally:
        os.close(descriptor)
