"""Packs a task's directories into tar files, with modes and links; equal directories give equal bytes."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from etude.errors import TaskError

MAX_ARCHIVE_BYTES = 64 << 20
_TIME_S = 946_684_800
"""Modification time of every entry: the year 2000, as some unpackers warn about 1970."""


def pack_directories(
    tops: Sequence[Path], script: str, *, needs_script: bool = True, without: str = ""
) -> bytes:
    """Tar file of the contents of `tops`, later ones overlaying earlier ones, without the file `without`; the
    file `script` is made executable.

    Raises TaskError for a missing script if `needs_script`, for one with CRLF line ends, for anything but
    files, directories and links within their top directory, and for more than MAX_ARCHIVE_BYTES.
    """
    found: dict[str, tuple[Path, Path]] = {}
    for top in tops:
        here = {path.relative_to(top): (path, top) for path in sorted(top.rglob("*"))}
        ends = {relative for relative, (path, _) in here.items() if path.is_symlink() or not path.is_dir()}
        found = {name: row for name, row in found.items() if ends.isdisjoint(Path(name).parents)}
        found |= {relative.as_posix(): row for relative, row in here.items()}
    name = tops[-1].name
    if needs_script and not (script in found and found[script][0].is_file()):
        raise directory_error(tops[-1].parent, f"{name}/{script}", "file is missing", f"add {name}/{script}")
    rows, total = list[tuple[tarfile.TarInfo, bytes]](), 0
    for relative, (path, top) in sorted(found.items(), key=lambda row: Path(row[0])):
        if relative == without:
            continue
        row, data = tarfile.TarInfo(relative), b""
        row.mode = stat.S_IMODE(path.lstat().st_mode) | (0o755 if relative == script else 0)
        if path.is_symlink():
            row.type, row.linkname = tarfile.SYMTYPE, _checked_link(path, top)
        elif path.is_dir():
            row.type = tarfile.DIRTYPE
        elif path.is_file():
            data = path.read_bytes()
        else:
            raise TaskError("is not a file", field=f"{name}/{relative}", fix="remove it")
        if relative == script and data.partition(b"\n")[0].endswith(b"\r"):
            fix = "end its lines with LF only: the CR would become a part of the interpreter's name"
            raise TaskError("has CRLF line ends", field=f"{name}/{script}", fix=fix)
        total += len(data)
        if total > MAX_ARCHIVE_BYTES:
            fix = f"put large files into the image: at most {MAX_ARCHIVE_BYTES >> 20} MiB"
            raise TaskError("is too large", field=name, received=relative, fix=fix)
        rows.append((row, data))
    return _pack(rows)


def pack_texts(files: Mapping[str, str]) -> bytes:
    """Tar file of text files: path -> text."""
    return _pack((tarfile.TarInfo(path), text.encode()) for path, text in files.items())


def _pack(rows: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for row, data in rows:
            row.mtime, row.size = _TIME_S, len(data)
            archive.addfile(row, io.BytesIO(data))
    return buffer.getvalue()


def directory_error(directory: Path, field: str, message: str, fix: str) -> TaskError:
    """The error for a file or field of the task in `directory`."""
    return TaskError(message, field=field, received=str(directory), fix=fix)


def _checked_link(path: Path, top: Path) -> str:
    target = path.readlink()
    try:
        is_within = not target.is_absolute() and path.resolve().is_relative_to(top.resolve())
    except (OSError, RuntimeError):  # links that lead in a circle, by the version of Python
        is_within = False
    if not is_within:
        raise TaskError(
            f"is a link to a path outside of {top.name}/, or to nothing",
            field=f"{top.name}/{path.relative_to(top).as_posix()}",
            received=str(target),
            fix="put the file itself there",
        )
    return str(target)
