"""What local sandboxes see of the host besides its programs: a project's Python environment and git history.

Each directory is mounted read-only at its own path, since environments name their files by absolute paths:

    /home/me/project/.venv     the host's, read-only            (python, pytest, the packages)
    /home/me/project/src       -> /workspace/src                (an editable install finds the copy)
    /opt/python/3.12           the host's, read-only            (the Python that the environment came from)
    /home/me/.local/bin/python -> /opt/python/3.12/bin/python   (an intermediate link, nothing next to it)

A repository can contain an environment of its own, whose links may lead anywhere: `HostView._refusal_reason`
decides what they may expose of the host.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import ConfigError
from etude.sandbox.inside.namespaces import ETC_DIRECTORIES, HOST_DIRECTORIES
from etude.sandbox.local.host_ids import find_host_ids
from etude.sandbox.paths import WORKSPACE

_OWN = ("tmp", "proc", "dev", "etc", "workspace", "tests", "logs", "solution")
"""Top-level directories of the sandbox itself: nothing of the host can be mounted below them."""
_NUM_LINKS = 40
"""Longest chain of links from an environment's `python` to the program."""


@dataclass(slots=True)
class HostView:
    """Host directories visible in sandboxes, and links to the workspace at the project's own path."""

    project: Path | None = None
    """The directory that the workspaces are copies of, absolute and without links; None: there is none."""
    directories: dict[str, str] = field(default_factory=dict[str, str])
    """Path in the sandbox -> directory of the host."""
    hops: dict[str, str] = field(default_factory=dict[str, str])
    """Path in the sandbox -> target of the host's link at that path."""
    programs: str = ""
    """Directory of programs that is first in PATH."""
    in_place: bool = False
    """Whether the workspaces are `project` itself, writable, at its own path."""
    git: str = ""
    """Additional lines of the system-wide git configuration."""

    @property
    def links(self) -> dict[str, str]:
        """Path in the sandbox -> target: a path of the workspace, or the next link of a chain."""
        return {**self.hops, **self._workspace_links()}

    def _workspace_links(self) -> dict[str, str]:
        if self.project is None or self.in_place:
            return {}
        project = str(self.project)
        below = [path for path in self.directories if path.startswith(f"{project}/")]
        if not below:
            return {} if self._is_shown(project) or _hidden_by(project) else {project: WORKSPACE}
        taken = {path.removeprefix(f"{project}/").split("/")[0] for path in below}
        names = sorted(entry.name for entry in self.project.iterdir() if entry.name not in taken)
        return {f"{project}/{name}": f"{WORKSPACE}/{name}" for name in names}

    def to_argument(self) -> str:
        """The view as an argument of the fork server (JSON)."""
        shown = {"directories": self.directories, "links": self.links, "programs": self.programs}
        in_place = str(self.project) if self.in_place else ""
        return json.dumps({**shown, "in_place": in_place, "git": self.git})

    def add_python(self, environment: Path) -> None:
        """Shows a Python environment, and the Python that it was made with; its programs are first in PATH.

        Raises ConfigError if it is no environment, may not be shown, or is unreadable to a sandbox's user.
        """
        prefix = environment.resolve()
        python = prefix / "bin" / "python"
        if not os.access(python, os.X_OK):
            raise ConfigError(
                "is not a Python environment: it has no executable bin/python",
                field="--venv",
                received=str(environment),
                fix="create it with `python -m venv DIR`, or use none with --venv none",
            )
        if self.project is not None and not self.in_place and self._is_shown(str(self.project)):
            raise ConfigError(
                "the project is in a directory that every sandbox sees unchanged: an environment could run "
                "its unchanged code",
                field="--venv",
                received=str(self.project),
                fix="move the project, or use --venv none",
            )
        is_environment = (prefix / "pyvenv.cfg").is_file() or _is_installation(prefix)
        if reason := self._refusal_reason(prefix, is_environment):
            raise _refusal(reason, str(prefix))
        self._show(str(prefix), prefix)
        self._add_homes(python)
        self.programs = str(prefix / "bin")

    def add_directory(self, directory: Path) -> None:
        """Shows a directory that the user has named, at its own path.

        Raises ConfigError if it is not a directory, may not be shown, or is unreadable to a sandbox's user.
        """
        source = directory.resolve()
        reason = self._refusal_reason(source, True) if source.is_dir() else "is not a directory"
        if reason:
            raise _refusal(reason, str(directory))
        self._show(str(directory), source)

    def _add_homes(self, python: Path) -> None:
        """Shows the installations on the chain of links from `python`; of other directories only the link."""
        for _ in range(_NUM_LINKS):
            home, is_link = python.parent.parent, python.is_symlink()
            target = Path(os.path.normpath(python.parent / python.readlink())) if is_link else python
            if not self._is_shown(str(python)):
                source = home.resolve()
                is_home = python.parent.name == "bin" and _is_installation(source)
                reason = self._refusal_reason(source, is_home)
                if not reason and not self._is_in_project(source):
                    self._show(str(home), source)
                elif not is_link:
                    reason = reason or "is in the project, but is not the environment"
                    raise _refusal(f"is the Python of this environment, but {home} {reason}", str(python))
                elif not self._is_in_project(python):
                    _check_path(str(python))
                    self.hops[str(python)] = str(target)
            if not is_link:
                return
            python = target
        raise _refusal("is a link with too many further links behind it", str(python))

    def _refusal_reason(self, directory: Path, is_wanted: bool) -> str:
        """Why a directory (without links) may not be shown; empty if it may. `is_wanted`: it is a Python
        environment or installation, or the user has named it.

        A shown directory is readable as a whole, by a model's commands and by tests of a repository that may
        be hostile and may link to any path. So only Python environments and installations are shown, which a
        repository cannot create outside of itself; and none that contains the project (its ignored files,
        which no copy has, would be readable, and its tests would run the unchanged code) or the user's home.
        `/` contains every project.
        """
        home = Path.home().resolve()
        if self.project is not None and self.project.is_relative_to(directory):
            return "contains the project: commands could read its ignored files and run its unchanged code"
        if home.is_relative_to(directory):
            return f"holds {home}, so commands could read everything in it"
        if not is_wanted:
            return "is not a Python environment or installation, so commands could read everything in it"
        return ""

    def _is_in_project(self, path: Path) -> bool:
        return self.project is not None and path.is_relative_to(self.project)

    def add_history(self) -> bool:
        """Shows the project's `.git`; False if it has none, or one that is a link, hidden or unreadable."""
        if self.project is None:
            return False
        git = self.project / ".git"
        if git.is_symlink() or not git.is_dir() or self._is_shown(str(git)) or _hidden_by(str(git)):
            return False
        try:
            _check_readable(git)
        except ConfigError:
            return False
        self.directories[str(git)] = str(git)
        return True

    def check_in_place(self) -> None:
        """Raises ConfigError if the project cannot be mounted at its own path."""
        if self.project is not None and _hidden_by(str(self.project)) not in ("", "tmp", "etc", "workspace"):
            raise ConfigError(
                "is at a path where a sandbox has its own files",
                field="--in-place",
                received=str(self.project),
                fix="move the project, or use --backend unisolated",
            )

    def _is_shown(self, path: str) -> bool:
        """Whether a path of the host is already visible in sandboxes."""
        shown = [
            *self.directories,
            os.path.realpath(sys.base_prefix),
            *(f"/{name}" for name in (*HOST_DIRECTORIES, *ETC_DIRECTORIES)),
            *([str(self.project)] if self.in_place else []),
        ]
        return any(f"{path}/".startswith(f"{one}/") for one in shown)

    def _show(self, path: str, source: Path) -> None:
        if self._is_shown(path):
            return
        _check_path(path)
        if os.geteuid() == 0 or not self.in_place:  # else commands run as the calling user
            _check_readable(source)
        self.directories[path] = str(source)


def find_environment(project: Path) -> Path | None:
    """The virtual environment of a project: its own `.venv` or `venv`, else the active one.

    Skipped are environments that contain the project, which cannot be shown (`HostView._refusal_reason`), and
    links to another directory of the project, which a repository could use to expose private files.
    """
    active = os.environ.get("VIRTUAL_ENV")
    project = project.resolve()
    own = [place for place in (project / ".venv", project / "venv") if not _leads_into(project, place)]
    for place in (*own, *([Path(active)] if active else [])):
        if (place / "pyvenv.cfg").is_file() and not project.is_relative_to(place.resolve()):
            return place
    return None


def _leads_into(project: Path, place: Path) -> bool:
    return place.is_symlink() and place.resolve().is_relative_to(project)


def _is_installation(directory: Path) -> bool:
    """Whether a directory contains a Python installation with its standard library."""
    return any(directory.glob("lib*/py*/os.py"))


def _refusal(message: str, received: str) -> ConfigError:
    return ConfigError(
        message,
        field="--venv",
        received=received,
        fix="create an environment in its own directory, from a Python in its own directory, and name it "
        "with --venv DIR; or use --venv none",
    )


def _hidden_by(path: str) -> str:
    """The sandbox's own directory that hides a path of the host (`/` for `/` itself); empty if none does."""
    first = path.split("/")[1]
    return (first or "/") if first in ("", *_OWN) else ""


def _check_path(path: str) -> None:
    """Raises ConfigError for a path below one of the sandbox's own directories."""
    if above := _hidden_by(path):
        raise ConfigError(
            f"is below /{above.strip('/')}, where a sandbox has its own files: it cannot be mounted there",
            field="--venv",
            received=path,
            fix="move the project or its environment to another place, or use --image, --dockerfile or "
            "--venv none",
        )


def _check_readable(directory: Path) -> None:
    """Raises ConfigError if a directory is unreadable to a sandbox's user, which is `nobody` on the host."""
    if os.geteuid() != 0 and find_host_ids().spare is None:
        return  # then sandboxes run as the user of this process
    for place in (
        directory,
        directory / "bin",
        directory / "lib",
        *directory.glob("lib/python*/site-packages"),
    ):
        if place.is_dir() and not stat.S_IMODE(place.stat().st_mode) & 0o005 == 0o005:
            raise ConfigError(
                "cannot be read by other users, but commands in a sandbox run as another user",
                field="--venv",
                received=str(place),
                fix=f"run chmod -R o+rX {directory}, or use --venv none",
            )
