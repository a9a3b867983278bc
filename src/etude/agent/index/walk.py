"""Lists the files of a directory to index: regular ones that are not hidden, as for `rg --no-ignore`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one directory. Paths are relative to it, as bytes."""

    files: dict[bytes, os.stat_result] = field(default_factory=dict[bytes, os.stat_result])
    """Regular files that are not hidden. Links are not followed."""
    directories: set[bytes] = field(default_factory=set[bytes])
    """Directories that are not hidden; the root is the empty path."""


def walk(root: Path) -> Listing:
    """Lists all below `root`. Entries that vanish meanwhile or may not be read are left out.

    Raises ConfigError if `root` is no directory.
    """
    if not root.is_dir():
        raise ConfigError(
            "is not a directory", field="root", received=str(root), fix="name the root of a source tree"
        )
    listing, queue = Listing(), [b""]
    while queue:
        directory = queue.pop()
        listing.directories.add(directory)
        try:
            with os.scandir(os.fsencode(root) + b"/" + directory) as entries:
                for entry in entries:
                    path = directory + b"/" + entry.name if directory else entry.name
                    if entry.name.startswith(b"."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(path)
                    elif entry.is_file(follow_symlinks=False):
                        listing.files[path] = entry.stat(follow_symlinks=False)
        except OSError:
            continue
    return listing
