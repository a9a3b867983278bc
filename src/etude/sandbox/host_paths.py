"""Files of the host on their way into a sandbox and out of it: which ones, and where to.

What comes out was named by somebody who is not trusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from etude.errors import ToolArgumentError
from etude.sandbox.errors import PathOutsideError


def files_of(source: Path) -> list[tuple[Path, str]]:
    """(file, its name below the source) of everything that is to be copied; "" names a source that is a file.

    Symbolic links are left out. Raises ToolArgumentError if there is nothing.
    """
    if source.is_dir():
        return [(file, file.relative_to(source).as_posix()) for file in _regular(source)]
    if source.is_file():
        return [(source, "")]
    raise ToolArgumentError(
        "no such file or directory", field="source", received=str(source), fix="name one that exists"
    )


def below(target: Path, name: str) -> Path:
    """Where a relative path that the other side made up belongs below `target`. Raises PathOutsideError."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise PathOutsideError("the other side names a path that leads out", field="path", received=name)
    path = target
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise PathOutsideError("a link lies in the way", field="target", received=str(path))
    return path / parts[-1]


def name_below(path: str, folder: str) -> str:
    """The rest of a listed path below the folder that was listed; "" if it does not lie there."""
    prefix = "" if folder == "." else folder + "/"
    return path[len(prefix) :] if path.startswith(prefix) else ""


def _regular(directory: Path) -> Iterator[Path]:
    """Regular files below a directory, sorted; links are not followed."""
    for folder, names, files in os.walk(directory):
        names.sort()
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path
