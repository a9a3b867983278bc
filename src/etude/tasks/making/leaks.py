"""Finds parts of a solution in the files that an agent can read: its workspace and its image.

reference - workspace = n-grams (runs) of 8 tokens that only the solution has
every file of a layer, once for all tasks, or of a task's workspace
    ──> texts (archives and git objects unpacked) ──> the runs that it contains
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

from etude.kit.syntax import read_text
from etude.tasks.making.changes import Change, Leak, Verified
from etude.tasks.making.tokens import changed_lines, code_tokens, runs

RUN_LENGTH = 8
MOST_BYTES = 64 << 20
"""Most bytes of one file or archive member, unpacked."""
_MOST_TOTAL = 512 << 20
"""Most bytes of all members of one archive."""
_MOST_MEMBERS = 20_000
_MOST_DEPTH = 3
_LOOSE_OBJECT = re.compile(r"(^|/)objects/[0-9a-f]{2}/[0-9a-f]{38,62}$")
_DEFINED = re.compile(r"^(?:(?:async )?def|class) (\w+)", re.MULTILINE)
_MEDIA = re.compile(r"\.(so[.\d]*|a|o|pt|bin|safetensors|png|jpe?g|gif|woff2?|ttf|mo)$")
_ZIP, _COMPRESSED = b"PK\x03\x04", (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")
_HEAD_BYTES = 4096
"""A file with a zero byte in this prefix is not text."""
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, ValueError)
_ERRORS = (*_DAMAGED, RuntimeError, NotImplementedError, KeyError)

Contents = Iterator[tuple[str, str, bytes | None]]
"""Name, kind of container, and the bytes; None if they are too many or damaged."""

_FOREIGN = (
    *("etc", "lib*", "usr/bin", "usr/include", "usr/lib*", "usr/sbin", "usr/share"),
    *("usr/local/lib/python*", "opt/*/lib/python*"),
)
"""Directories of a layer with system packages, the interpreter's library, and distributions."""
_Run = tuple[str, ...]
_Words = Mapping[bytes, Collection[tuple[bytes, ...]]]
"""Longest word of a run -> the run's other words, longest first: a file that lacks a word of every run
contains none of them."""


@dataclass(frozen=True, slots=True)
class _Hunk:
    change: Change
    runs: frozenset[_Run]
    """Runs that the change's workspace lacks."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Search data for the solutions of some changes."""

    by_run: Mapping[_Run, Sequence[_Hunk]]
    words: _Words
    words_of_hunks: _Words
    """Words of each whole hunk."""
    modules: Mapping[str, Sequence[tuple[str, Change, Collection[bytes]]]]
    """File name without its suffix -> (module path, change, names defined in the module)."""


def scan_layers(
    layers: Sequence[Path], changes: Sequence[Change], files: Mapping[str, bytes]
) -> dict[str, str]:
    """Leaks of solutions in an image: id of the change -> reason.

    `files`: the project's own. Each layer is scanned by itself, so files that a later one removes count too.
    Raises OSError.
    """
    reasons: dict[str, str] = {}
    sources = _read_texts(files)
    for layer in layers:
        foreign = [path.relative_to(layer).as_posix() for glob in _FOREIGN for path in layer.glob(glob)]
        for change, leaks in find_leaks(layer, changes, sources, foreign).items():
            reasons.setdefault(change, _describe(leaks, "the image"))
    return reasons


def scan_workspace(workspace: Path, verified: Verified, files: Mapping[str, bytes]) -> str | None:
    """The leak of a task's solution in its own workspace, which has this path and contains `files`; None
    without one."""
    sources = _read_texts(files) | dict(verified.reference)
    leaks = find_leaks(workspace, [verified.change], sources).get(verified.change.id)
    return _describe(leaks, "the workspace") if leaks else None


def _read_texts(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: text for path, data in files.items() if (text := read_text(data)) is not None}


def _describe(leaks: Sequence[Leak], where: str) -> str:
    first = leaks[0]
    more = f", and {len(leaks) - 1} more" if len(leaks) > 1 else ""
    return f"{where} gives the solution away: {first.path} ({first.how}: {first.found}){more}"


def find_leaks(
    root: Path, changes: Sequence[Change], sources: Mapping[str, str], foreign: Collection[str] = ()
) -> dict[str, list[Leak]]:
    """For each change, by id, the files under `root` that give its solution away; one walk for all.

    `sources`: the project's own texts of every file of the workspace; runs that its other files contain are
    no leaks. An image without the workspace is scanned for all changes at once, a workspace only for its own.
    `foreign`: paths below `root` of third-party files (the system's packages, the interpreter's library,
    other distributions), in which only a whole hunk counts, as single runs occur by chance. Copies of the
    project's own modules count everywhere. A text or archive that is too large or damaged to be read counts
    as a leak of every change. Symbolic links are not followed.
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
    hunks = [(change, found) for change in changes for found in _hunks_of(change, sources)]
    every = {run for _, found in hunks for run in found}
    words = _find_words(every)
    holders: dict[_Run, set[str]] = {}
    for path, text in sources.items():
        if _may_hold(text.encode("utf-8", "replace"), words):
            for run in every.intersection(runs(code_tokens(text), RUN_LENGTH)):
                holders.setdefault(run, set()).add(path)
    by_run: dict[_Run, list[_Hunk]] = {}
    kept: list[_Hunk] = []
    for change, found in hunks:
        elsewhere = {run for run in found if holders.get(run, set()) - change.files.keys()}
        hunk = _Hunk(change, frozenset(found - elsewhere))
        kept.append(hunk)
        for run in hunk.runs:
            by_run.setdefault(run, []).append(hunk)
    modules: dict[str, list[tuple[str, Change, Collection[bytes]]]] = {}
    for change in changes:
        # Names of the changed functions, else of all definitions: a copy of the module contains one of them.
        names = {place.name.rpartition(".")[2] for place in change.places} - {""}
        for path, text in change.files.items():
            held = [one.encode() for one in names or _DEFINED.findall(text)]
            modules.setdefault(PurePosixPath(path).stem, []).append((path, change, held))
    hunk_words = _find_words(tuple(chain.from_iterable(one.runs)) for one in kept if one.runs)
    return _Wanted(by_run, _find_words(by_run), hunk_words, modules)


def _find_words(every: Iterable[_Run]) -> _Words:
    words: dict[bytes, set[tuple[bytes, ...]]] = {}
    for run in every:
        plain = {token.strip('"').split("\n")[0].split("\\")[0] for token in run}
        first, *others = sorted((one.encode("utf-8", "replace") for one in plain), key=len, reverse=True)
        words.setdefault(first, set()).add(tuple(others))
    return words


def _may_hold(data: bytes, words: _Words) -> bool:
    """Whether a file has all words of some run, in any order: a cheap test before it is tokenised."""
    return any(
        first in data and any(all(word in data for word in others) for others in more)
        for first, more in words.items()
    )


def _hunks_of(change: Change, sources: Mapping[str, str]) -> Iterator[set[_Run]]:
    """For each hunk, the reference's runs that touch it and that the broken files lack."""
    held = {run for text in change.files.values() for run in runs(code_tokens(text), RUN_LENGTH)}
    for path, broken in change.files.items():
        lines = sources[path].split("\n")
        for _, (first, last) in changed_lines(broken, sources[path]):
            text = "\n".join(lines[max(0, first - RUN_LENGTH) : last + RUN_LENGTH])
            found = set(runs(code_tokens(text), RUN_LENGTH)) - held
            if found:
                yield found


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
    for path, change, names in wanted.modules.get(stem, ()):
        if _is_copy(name, path, data, names):
            if not name.endswith(".py"):
                yield change, Leak(name, "bytecode", path)
            elif data.decode("utf-8", "replace").replace("\r\n", "\n") != change.files[path]:
                yield change, Leak(name, "importable copy", path)


def _find_text(
    name: str, how: str, data: bytes, wanted: _Wanted, is_foreign: bool
) -> Iterator[tuple[Change, Leak]]:
    if b"\0" in data[:_HEAD_BYTES] or not _may_hold(
        data, wanted.words_of_hunks if is_foreign else wanted.words
    ):
        return
    found = wanted.by_run.keys() & set(runs(code_tokens(data.decode("utf-8", "replace")), RUN_LENGTH))
    for hunk in {id(hunk): hunk for run in sorted(found) for hunk in wanted.by_run[run]}.values():
        if not is_foreign or hunk.runs <= found:
            yield hunk.change, Leak(name, how, " ".join(min(hunk.runs & found)))


def _is_copy(name: str, module: str, data: bytes, names: Collection[bytes]) -> bool:
    """Whether a file is the module, compiled or not, by its path and the functions in it."""
    path, own = PurePosixPath(name.rpartition("!")[2]), PurePosixPath(module)
    is_top = len(own.parts) < 2 or (len(own.parts) == 2 and own.parts[0] in ("src", "lib", "python"))
    stem, folder = own.stem, "" if is_top else own.parent.name
    if path.suffix not in (".py", ".pyc", ".pyo", ".so", ".pyd") or path.name.partition(".")[0] != stem:
        return False
    parents = [part for part in path.parts[:-1] if part != "__pycache__"]
    beside = (
        parents[-1:] == [folder] if folder else bool({"site-packages", "dist-packages"} & set(parents[-1:]))
    )
    is_near = beside or (not folder and path.suffix in (".pyc", ".pyo"))
    return is_near and (not names or any(one in data for one in names))


def read_contents(path: Path, name: str) -> Contents:
    """The contents of the file at `path`, called `name`, with archives and git objects unpacked; None for a
    file that cannot be opened."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size > MOST_BYTES:
                is_other = _MEDIA.search(name) or _is_program(file.read(_HEAD_BYTES))
                yield from [] if is_other else [(name, "text", None)]
                return
            data = file.read()
    except OSError:
        yield name, "text", None
        return
    yield from _unpack(name, data, "text", 0)


def _is_program(head: bytes) -> bool:
    """Whether a file with this beginning is neither text nor an archive, and need not be read."""
    is_archive = head.startswith((_ZIP, *_COMPRESSED, b"PACK")) or head[257:262] == b"ustar"
    return b"\0" in head and not is_archive


def _unpack(name: str, data: bytes, how: str, depth: int) -> Contents:
    if _LOOSE_OBJECT.search(name):
        yield name, "git object", _inflate(data)
        return
    if data.startswith(b"PACK") and name.endswith(".pack"):
        yield name, "git object", None  # its objects are differences of one another
        return
    if depth > _MOST_DEPTH:
        yield name, how, None
        return
    try:
        if data.startswith(_COMPRESSED):
            yield from _unpack(f"{name}!", _decompress(data), "archive", depth + 1)
        elif data.startswith(_ZIP) or data[257:262] == b"ustar":
            yield from _unpack_members(name, data, depth)
        else:
            yield name, how, data
    except _ERRORS:
        yield name, "archive", None


def _inflate(data: bytes) -> bytes | None:
    try:
        inflater = zlib.decompressobj()
        found = inflater.decompress(data, MOST_BYTES)
    except zlib.error:
        return None
    if inflater.unconsumed_tail:
        return None
    return found.partition(b"\0")[2] if found.startswith(b"blob ") else b""


def _decompress(data: bytes) -> bytes:
    openers = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
    with openers[data[:2]](io.BytesIO(data)) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return found


def _unpack_members(name: str, data: bytes, depth: int) -> Contents:
    file, is_zip = io.BytesIO(data), data.startswith(_ZIP)
    with zipfile.ZipFile(file) if is_zip else tarfile.open(fileobj=file) as archive:
        if isinstance(archive, zipfile.ZipFile):
            members = [one for one in archive.infolist() if not one.is_dir()]
            rows = [(one.filename, one.file_size, partial(archive.open, one)) for one in members]
        else:
            files = [one for one in archive if one.isreg()]
            rows = [(one.name, one.size, partial(archive.extractfile, one)) for one in files]
        if len(rows) > _MOST_MEMBERS or sum(size for _, size, _ in rows) > _MOST_TOTAL:
            yield name, "archive", None
            return
        for inner, size, open_member in rows:
            with open_member() or io.BytesIO() as member:
                content = member.read(MOST_BYTES) if size <= MOST_BYTES else None
            if content is None:
                yield f"{name}!{inner}", "archive", None
            else:
                yield from _unpack(f"{name}!{inner}", content, "archive", depth + 1)
