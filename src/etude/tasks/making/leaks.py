"""Where an image holds a part of the solution: as text, bytecode, in an archive, or in git's objects.

reference - workspace = runs of 8 tokens that only the solution has
every file of the image -> texts (archives and git objects unpacked) -> which of the runs it holds
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.tasks.making.changes import Change, Leak
from etude.tasks.making.contents import read_contents
from etude.tasks.making.tokens import changed_lines, code_tokens, runs

RUN_LENGTH = 8
_Run = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Hunk:
    change: Change
    runs: frozenset[_Run]
    """Those that the change's workspace lacks."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What of some solutions is looked for."""

    hunks: Sequence[_Hunk]
    by_run: Mapping[_Run, Sequence[_Hunk]]
    words: Mapping[bytes, frozenset[tuple[bytes, ...]]]
    """The longest word of each run -> its others, the longest first: a file without all of them, for every
    run, holds none."""
    modules: Mapping[str, Sequence[tuple[str, Change]]]
    """File name without its ending -> paths of modules below their source folder."""


def find_leaks(
    root: Path, changes: Sequence[Change], sources: Mapping[str, str], foreign: Collection[str] = ()
) -> dict[str, list[Leak]]:
    """For each change, by id, the files under `root` that give its solution away; one walk for all.

    `sources` are the project's own texts of every file of the workspace: what the workspace holds
    elsewhere is no leak. An image without the workspace is scanned for all changes at once, a workspace
    for its own. `foreign` are paths below `root` of what is known to be of others (the interpreter's
    library, other distributions): there only a whole hunk counts, for single runs occur by chance. Copies
    of the project's own modules count everywhere. What is too large or damaged to be read counts as a leak
    of every change. Symbolic links are not followed.
    """
    wanted = _find_wanted(changes, sources)
    leaks: dict[str, list[Leak]] = {}
    for path, name in _walk(root):
        is_foreign = any(name == one or name.startswith(f"{one}/") for one in foreign)
        for inner, how, data in read_contents(path, name):
            if data is None:
                found = [(one, Leak(inner, "not read", "too large or damaged")) for one in changes]
            else:
                found = [
                    *_find_copies(inner, data, wanted),
                    *_find_text(inner, how, data, wanted, is_foreign),
                ]
            for change, leak in found:
                leaks.setdefault(change.id, []).append(leak)
    return leaks


def _find_wanted(changes: Sequence[Change], sources: Mapping[str, str]) -> _Wanted:
    hunks = [_Hunk(change, frozenset(found)) for change in changes for found in _hunks_of(change, sources)]
    every = {run for hunk in hunks for run in hunk.runs}
    holders: dict[_Run, set[str]] = {}
    for path, text in sources.items():
        for run in every.intersection(runs(code_tokens(text), RUN_LENGTH)):
            holders.setdefault(run, set()).add(path)
    kept = list[_Hunk]()
    for hunk in hunks:
        elsewhere = {run for run in hunk.runs if holders.get(run, set()) - hunk.change.files.keys()}
        kept.append(_Hunk(hunk.change, hunk.runs - elsewhere))
    by_run: dict[_Run, list[_Hunk]] = {}
    for hunk in kept:
        for run in hunk.runs:
            by_run.setdefault(run, []).append(hunk)
    words: dict[bytes, set[tuple[bytes, ...]]] = {}
    for run in by_run:
        plain = {token.strip('"').split("\n")[0].split("\\")[0] for token in run}
        first, *others = sorted((one.encode("utf-8", "replace") for one in plain), key=len, reverse=True)
        words.setdefault(first, set()).add(tuple(others))
    modules: dict[str, list[tuple[str, Change]]] = {}
    for change in changes:
        for path in change.files:
            modules.setdefault(PurePosixPath(path).stem, []).append((path, change))
    return _Wanted(kept, by_run, {first: frozenset(others) for first, others in words.items()}, modules)


def _hunks_of(change: Change, sources: Mapping[str, str]) -> Iterator[set[_Run]]:
    """Per difference, the reference's runs that touch it and that the broken files lack."""
    held = {run for text in change.files.values() for run in runs(code_tokens(text), RUN_LENGTH)}
    for path, broken in change.files.items():
        lines = sources[path].split("\n")
        for _, (first, last) in changed_lines(broken, sources[path]):
            text = "\n".join(lines[max(0, first - RUN_LENGTH) : last + RUN_LENGTH])
            found = set(runs(code_tokens(text), RUN_LENGTH)) - held
            if found:
                yield found


def _module_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    return "/".join(parts[1:] if parts[0] in ("src", "lib", "python") and len(parts) > 1 else parts)


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    for folder, names, files in os.walk(root, followlinks=False):
        names.sort()
        for file in sorted(files):
            path = Path(folder, file)
            try:
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path, path.relative_to(root).as_posix()
            except OSError:
                continue


def _find_copies(name: str, data: bytes, wanted: _Wanted) -> Iterator[tuple[Change, Leak]]:
    stem = PurePosixPath(name.rpartition("!")[2]).name.partition(".")[0]
    for path, change in wanted.modules.get(stem, ()):
        if _is_copy(name, _module_path(path), data, {place.name for place in change.places}):
            if not name.endswith(".py"):
                yield change, Leak(name, "bytecode", path)
            elif data.decode("utf-8", "replace").replace("\r\n", "\n") != change.files[path]:
                yield change, Leak(name, "importable copy", path)


def _find_text(
    name: str, how: str, data: bytes, wanted: _Wanted, is_foreign: bool
) -> Iterator[tuple[Change, Leak]]:
    if b"\0" in data[:4096] or not any(
        first in data and any(all(word in data for word in others) for others in more)
        for first, more in wanted.words.items()
    ):
        return
    found = wanted.by_run.keys() & set(runs(code_tokens(data.decode("utf-8", "replace")), RUN_LENGTH))
    for hunk in {id(hunk): hunk for run in found for hunk in wanted.by_run[run]}.values():
        if not is_foreign or hunk.runs <= found:
            yield hunk.change, Leak(name, how, " ".join(min(hunk.runs & found)))


def _is_copy(name: str, module: str, data: bytes, scopes: Collection[str]) -> bool:
    """Whether a file is the module, compiled or not: by its path, and by the functions that it holds."""
    path, names = PurePosixPath(name.rpartition("!")[2]), [one.rpartition(".")[2].encode() for one in scopes]
    stem, folder = PurePosixPath(module).stem, PurePosixPath(module).parent.name
    if path.suffix not in (".py", ".pyc", ".pyo", ".so", ".pyd") or path.name.partition(".")[0] != stem:
        return False
    parents = [part for part in path.parts[:-1] if part != "__pycache__"]
    beside = (
        parents[-1:] == [folder] if folder else bool({"site-packages", "dist-packages"} & set(parents[-1:]))
    )
    if path.suffix in (".pyc", ".pyo"):
        return (beside or not folder) and (not names or any(one in data for one in names))
    return beside and (not names or any(one in data for one in names))
