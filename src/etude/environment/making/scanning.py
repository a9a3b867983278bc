"""Whether what an agent finds in its sandbox gives a task's solution away: its workspace, and its image.

every layer of the image, once for all tasks ──> reason of a reject, by change
the workspace of a task, as it is written    ──> the same for this task
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from etude.environment.making.projects import read_text
from etude.environment.making.writing import MadeTask
from etude.tasks.making.changes import Change, Leak
from etude.tasks.making.leaks import find_leaks

_OF_PYTHON = (
    *("lib/python*", "usr/lib/python*", "usr/local/lib/python*", "opt/*/lib/python*"),
    "usr/share/python-wheels",
)
"""Directories of a layer with the interpreter's library, and with distributions: installed, or as wheels."""


def scan_layers(
    layers: Sequence[Path], changes: Sequence[Change], files: Mapping[str, bytes]
) -> dict[str, str]:
    """Why tasks of one project are given away by an image: id of the change -> reason.

    `files`: the project's own. Each layer is read by itself: what a later one removes counts too. Raises
    OSError.
    """
    reasons: dict[str, str] = {}
    sources = _read_texts(files)
    for layer in layers:
        for change, leaks in find_leaks(layer, changes, sources, list(_find_foreign(layer))).items():
            reasons.setdefault(change, _describe(leaks, "the image"))
    return reasons


def scan_workspace(workspace: Path, made: MadeTask) -> str | None:
    """Why a task is given away by its own workspace, which lies at this path; None if it is not."""
    change = made.verified.change
    sources = _read_texts(made.workspace) | dict(made.verified.reference)
    leaks = find_leaks(workspace, [change], sources).get(change.id)
    return _describe(leaks, "the workspace") if leaks else None


def _read_texts(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: text for path, data in files.items() if (text := read_text(data)) is not None}


def _find_foreign(layer: Path) -> Iterator[str]:
    for pattern in _OF_PYTHON:
        for path in layer.glob(pattern):
            yield path.relative_to(layer).as_posix()


def _describe(leaks: Sequence[Leak], where: str) -> str:
    first = leaks[0]
    more = f", and {len(leaks) - 1} more" if len(leaks) > 1 else ""
    return f"{where} gives the solution away: {first.path} ({first.how}: {first.found}){more}"
