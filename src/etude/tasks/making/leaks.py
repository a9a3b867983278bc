"""Where an image holds a part of the solution: as text, bytecode, in an archive, or in git's objects.

reference - workspace = runs of 8 tokens that only the solution has
every file of the image -> texts (archives and git objects unpacked) -> which of the runs it holds
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.tasks.making.changes import Change, Leak
from etude.tasks.making.contents import MOST_BYTES, read_contents
from etude.tasks.making.tokens import changed_lines, code_tokens, runs

RUN_LENGTH = 8


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What of a solution is looked for."""

    hunks: tuple[frozenset[tuple[str, ...]], ...]
    """Per hunk, the runs that the workspace lacks."""
    words: tuple[bytes, ...]
    """A file that holds none of these words holds none of the runs."""
    modules: Mapping[str, str]
    """Module's path below its source folder -> its text in the workspace."""
    names: frozenset[bytes]
    """Of the functions that were changed."""


def find_leaks(
    root: Path, change: Change, sources: Mapping[str, str], foreign: Collection[str] = ()
) -> list[Leak]:
    """Every file under `root` that gives a part of the solution away; symbolic links are not followed.

    `sources` are the project's own texts: every file of the workspace, since what the workspace itself
    holds is no leak. `foreign` are paths below `root` of what is known to be of others (the interpreter's
    library, other distributions): there only a whole hunk counts, for single runs occur by chance. Copies
    of the project's own modules count everywhere. What is too large to read counts as a leak.
    """
    wanted, leaks = _find_wanted(change, sources), list[Leak]()
    for path, name in _walk(root):
        is_foreign = any(name == one or name.startswith(f"{one}/") for one in foreign)
        for inner, how, data in read_contents(path, name):
            leaks += _judge(inner, how, data, wanted, is_foreign)
    return leaks


def _find_wanted(change: Change, sources: Mapping[str, str]) -> _Wanted:
    held = set[tuple[str, ...]]()
    for text in {**sources, **change.files}.values():
        held |= set(runs(code_tokens(text), RUN_LENGTH))
    hunks = list[frozenset[tuple[str, ...]]]()
    for path, broken in change.files.items():
        lines = sources[path].split("\n")
        for _, (first, last) in changed_lines(broken, sources[path]):
            text = "\n".join(lines[max(0, first - RUN_LENGTH) : last + RUN_LENGTH])
            hunks.append(frozenset(runs(code_tokens(text), RUN_LENGTH)) - held)
    hunks = [hunk for hunk in hunks if hunk]
    longest = {max(run, key=len) for hunk in hunks for run in hunk}
    names = {place.name.rpartition(".")[2].encode() for place in change.places if place.name}
    modules = {_module_path(path): text for path, text in change.files.items()}
    words = tuple(word.strip('"').split("\n")[0].encode("utf-8", "replace") for word in sorted(longest))
    return _Wanted(tuple(hunks), words, modules, frozenset(names))


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


def _judge(name: str, how: str, data: bytes | None, wanted: _Wanted, is_foreign: bool) -> Iterator[Leak]:
    if data is None:
        yield Leak(name, "not read", f"more than {MOST_BYTES} bytes, or damaged")
        return
    for module, broken in wanted.modules.items():
        if _is_copy(name, module, data, wanted.names):
            if not name.endswith(".py"):
                yield Leak(name, "bytecode", module)
            elif data.decode("utf-8", "replace").replace("\r\n", "\n") != broken:
                yield Leak(name, "importable copy", module)
    if b"\0" in data[:4096] or not any(word in data for word in wanted.words):
        return
    found = set(runs(code_tokens(data.decode("utf-8", "replace")), RUN_LENGTH))
    for hunk in wanted.hunks:
        shared = hunk & found
        if shared == hunk or (shared and not is_foreign):
            yield Leak(name, how, " ".join(min(shared)))


def _is_copy(name: str, module: str, data: bytes, names: Collection[bytes]) -> bool:
    """Whether a file is the module, compiled or not: by its path, and by the functions that it holds."""
    path = PurePosixPath(name.rpartition("!")[2])
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
