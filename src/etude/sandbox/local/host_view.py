"""What local sandboxes see of the host beside its programs: a project's own Python, and its history.

Each directory is shown read-only at its own path, since environments name their files by absolute paths:

    /home/me/project/.venv     the host's, read-only            (python, pytest, the packages)
    /home/me/project/src       -> /workspace/src                (an editable install finds the copy)
    /opt/python/3.12           the host's, read-only            (the Python that the environment came from)
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import ConfigError
from etude.sandbox.inside.namespaces import HOST_DIRECTORIES
from etude.sandbox.local.host_ids import find_host_ids
from etude.sandbox.paths import WORKSPACE

_OWN = ("tmp", "proc", "dev", "etc", "workspace", "tests", "logs", "solution")
"""Directories of a sandbox's own: nothing of the host can be shown below them."""
_NUM_LINKS = 40
"""In a row, from an environment's `python` to the program."""


@dataclass(slots=True)
class HostView:
    """Directories of the host that sandboxes see, and links to their workspace at the project's own path."""

    project: Path
    """The directory that the workspace is a copy of; absolute, without links."""
    directories: dict[str, str] = field(default_factory=dict[str, str])
    """Path in the sandbox -> directory of the host."""
    programs: str = ""
    """Directory of programs that come first in PATH."""

    @property
    def links(self) -> dict[str, str]:
        """Path in the sandbox -> what of the workspace it leads to."""
        project = str(self.project)
        below = [path for path in self.directories if path.startswith(f"{project}/")]
        if not below:
            return {} if self._is_shown(project) or _owner(project) else {project: WORKSPACE}
        taken = {path.removeprefix(f"{project}/").split("/")[0] for path in below}
        names = sorted(entry.name for entry in self.project.iterdir() if entry.name not in taken)
        return {f"{project}/{name}": f"{WORKSPACE}/{name}" for name in names}

    def word(self) -> str:
        """Argument of the fork server."""
        shown = {"directories": self.directories, "links": self.links, "programs": self.programs}
        return json.dumps(shown)

    def add_python(self, environment: Path) -> None:
        """Shows a Python environment, and the Python that it was made with; its programs come first.

        Raises ConfigError for what is none, cannot be shown, or cannot be read by a sandbox's user.
        """
        prefix = environment.resolve()
        python = prefix / "bin" / "python"
        if not os.access(python, os.X_OK):
            raise ConfigError(
                "is no Python environment: it has no bin/python that can be run",
                field="--venv",
                received=str(environment),
                fix="make it with `python -m venv DIR`, or leave the project's out with --venv none",
            )
        self._show(str(prefix), prefix)
        for home in _homes(python):
            self._show(str(home), home.resolve())
        self.programs = str(prefix / "bin")

    def add_history(self) -> bool:
        """Shows the project's `.git`; False where it has none, lies elsewhere or cannot be read."""
        git = self.project / ".git"
        if git.is_symlink() or not git.is_dir() or self._is_shown(str(git)) or _owner(str(git)):
            return False
        try:
            _check_readable(git)
        except ConfigError:
            return False
        self.directories[str(git)] = str(git)
        return True

    def _is_shown(self, path: str) -> bool:
        """Whether sandboxes see a path of the host anyway."""
        shown = [
            *self.directories,
            os.path.realpath(sys.base_prefix),
            *(f"/{name}" for name in HOST_DIRECTORIES),
        ]
        return any(f"{path}/".startswith(f"{one}/") for one in shown)

    def _show(self, path: str, source: Path) -> None:
        if self._is_shown(path):
            return
        if owner := _owner(path):
            raise ConfigError(
                f"lies below /{owner}, where a sandbox has files of its own: it cannot be shown there",
                field="--venv",
                received=path,
                fix="move the project or its environment to another place, use --image or --dockerfile, or "
                "go without it: --venv none",
            )
        _check_readable(source)
        self.directories[path] = str(source)


def find_environment(project: Path) -> Path | None:
    """The virtual environment of a project: its own `.venv` or `venv`, else the one that is active."""
    active = os.environ.get("VIRTUAL_ENV")
    for place in (project / ".venv", project / "venv", *([Path(active)] if active else [])):
        if (place / "pyvenv.cfg").is_file():
            return place
    return None


def _homes(python: Path) -> Iterator[Path]:
    """Installations that the links from `python` lead through, each by the path that a link names."""
    for _ in range(_NUM_LINKS):
        if not python.is_symlink():
            return
        python = Path(os.path.normpath(python.parent / python.readlink()))
        if python.parent.name == "bin":
            yield python.parent.parent


def _owner(path: str) -> str:
    """The sandbox's own directory that hides a path of the host; empty if none does."""
    first = path.split("/")[1]
    return first if first in _OWN or not first else ""


def _check_readable(directory: Path) -> None:
    """Raises ConfigError where a sandbox's user, who is nobody on the host, may not read a directory."""
    if os.geteuid() != 0 and find_host_ids().spare is None:
        return  # then it is the user of this process
    for place in (
        directory,
        directory / "bin",
        directory / "lib",
        *directory.glob("lib/python*/site-packages"),
    ):
        if place.is_dir() and not stat.S_IMODE(place.stat().st_mode) & 0o005 == 0o005:
            raise ConfigError(
                "cannot be read by other users, and commands in a sandbox run as one",
                field="--venv",
                received=str(place),
                fix=f"chmod -R o+rX {directory}, or go without it: --venv none",
            )
