"""Past changes of a project, as sources of tasks: commits of its repository, or its earlier releases.

    REPO/.git               ──> each commit of the first parents, newest first ──┐ those that change modules
    earlier releases, REPO  ──> each release after the first, newest first     ──┴─> and tests ──> PastChange

Git only lists and reads objects: nothing is checked out, and nothing of a repository runs.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

from etude.environment.making.projects import Project, is_test_file, read_project
from etude.errors import TaskError
from etude.kit.git import git_fault, run_git
from etude.kit.syntax import read_text
from etude.tasks.making.undoing import PastChange

_MOST_COMMITS = 1000
_Row = tuple[str, str, str]
"""Path, and its object before and after."""


def find_past(repo: Path, releases: Sequence[Path], project: Project) -> Iterable[PastChange]:
    """The past changes of a project, newest first: between `releases` (oldest first), if given, or commits.

    Raises TaskError for a release or a repository that cannot be read.
    """
    if releases:
        return _compare_releases([*map(_read_release, releases), project])
    commits = _list_commits(repo, project) if (repo / ".git").exists() else []
    return (_read_commit(repo, rows) for rows in commits)


def _read_release(path: Path) -> Project:
    try:
        if path.is_dir():
            return read_project(path)
        with tempfile.TemporaryDirectory(prefix="etude-release-") as folder, tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
            inner = list(Path(folder).iterdir())
            return read_project(inner[0] if len(inner) == 1 else Path(folder))
    except (TaskError, OSError, tarfile.TarError) as error:
        raise TaskError(
            f"cannot be read: {error}", field="--release", received=str(path),
            fix="name an unpacked source distribution, or its .tar.gz, with its tests",
        ) from error  # fmt: skip


def _compare_releases(releases: Sequence[Project]) -> list[PastChange]:
    found: list[PastChange] = []
    root = releases[-1].source_root
    for old, new in pairwise(releases):
        before, after = (
            {
                PurePosixPath(root, PurePosixPath(path).relative_to(one.source_root)).as_posix(): text
                for path, text in one.sources.items()
            }
            for one in (old, new)
        )
        changed = {path: text for path, text in after.items() if before.get(path) != text}
        if changed and old.test_texts != new.test_texts:
            found.append(PastChange({path: before[path] for path in changed if path in before}, changed))
    return found[::-1]


def _list_commits(repo: Path, project: Project) -> list[list[_Row]]:
    """For each commit that changes modules and tests: the modules that it changes."""
    words = ("rev-list", "--first-parent", "--parents", f"--max-count={_MOST_COMMITS}", "--ignore-missing")
    listed = _git(repo, *words, "HEAD").decode().splitlines()
    pairs = "".join(f"{' '.join(line.split()[:2])}\n" for line in listed if " " in line)
    words = ("diff-tree", "--stdin", "-r", "-z", "--raw", "--no-renames", "--no-abbrev")
    commits: list[list[_Row]] = []
    rows = iter(_git(repo, *words, stdin=pairs.encode()).decode(errors="surrogateescape").split("\0"))
    for row in rows:
        if row.startswith(":"):
            _, _, old, new, _ = row.split()
            commits[-1].append((next(rows), old, new))
        elif row:
            commits.append([])
    return [
        modules
        for rows in commits
        if any(path in project.tests or is_test_file(path) for path, _, _ in rows)
        and (modules := [row for row in rows if row[0] in project.sources])
    ]


def _read_commit(repo: Path, rows: Sequence[_Row]) -> PastChange:
    names = {name for _, *both in rows for name in both if name.strip("0")}
    rest = _git(repo, "cat-file", "--batch", stdin="".join(f"{name}\n" for name in names).encode())
    texts: dict[str, str] = {}
    while rest:
        header, _, rest = rest.partition(b"\n")
        name, kind, *size = header.decode().split()
        if kind == "blob":
            text, rest = read_text(rest[: int(size[0])]), rest[int(size[0]) + 1 :]
            texts |= {name: text} if text is not None else {}
    return PastChange(
        {path: texts[old] for path, old, _ in rows if old in texts},
        {path: texts[new] for path, _, new in rows if new in texts},
    )


def _git(repo: Path, *words: str, stdin: bytes = b"") -> bytes:
    """The output of git. Raises TaskError."""
    try:
        return run_git(repo, *words, stdin=stdin, alone=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise TaskError(
            f"its git history cannot be read: {git_fault(error)}", field="REPO", received=str(repo),
            fix="correct that, or name a copy without .git",
        ) from error  # fmt: skip
