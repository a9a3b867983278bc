"""Packing of layers as tar files, and unpacking.

In OCI's format: `.wh.name` for a whiteout, `.wh..wh..opq` for an opaque directory. Everything belongs to one
user, so owners are not stored. Files that a tar file cannot represent are refused. No function here recurses:
the agent made these trees.

Equal trees give equal bytes. Unlike images/extract.py, which accepts archives of strangers, this reads only
what `pack_tree` wrote: with times to the nanosecond, pipes and names of any kind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import IO

OPAQUE = "user.overlay.opaque"
"""Attribute of an opaque directory: in an overlay it hides the entries of the layers below."""
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass
class Folder:
    """An open directory of a tree walk."""

    descriptor: int
    prefix: str
    """Its path with a slash at the end; empty for the top."""
    status: os.stat_result
    copy: int = -1
    names: list[str] = field(default_factory=list)
    """Names still to be visited, in reverse order."""

    def __post_init__(self) -> None:
        self.names = sorted(os.listdir(self.descriptor), reverse=True)

    def enter(self, name: str, status: os.stat_result, copy: int = -1) -> Folder:
        """Opens the subdirectory `name`. Raises OSError."""
        inner = os.open(name, DIRECTORY_FLAGS, dir_fd=self.descriptor)
        return Folder(inner, f"{self.prefix}{name}/", status, copy)

    def close(self) -> None:
        """Closes its descriptors."""
        os.close(self.descriptor)
        if self.copy >= 0:
            os.close(self.copy)


def walk_tree(
    top: Folder,
    skips: Callable[[Folder, str], bool] = lambda folder, name: False,
    enter: Callable[[Folder, str, os.stat_result], Folder | None] = Folder.enter,
    leave: Callable[[Folder], None] = Folder.close,
) -> Generator[tuple[Folder, str, os.stat_result], None, None]:
    """(folder, name, status) of everything below a directory, in order, without the entries that `skips`
    selects. Follows no links; leaves out entries removed since they were listed.

    `enter` opens a directory after it was yielded, or returns None to skip its contents; `leave` closes it
    after its last entry. Raises OSError.
    """
    folders = [top]
    try:
        while folders:
            folder = folders[-1]
            if not folder.names:
                leave(folder)
                folders.pop()
                continue
            name = folder.names.pop()
            if skips(folder, name):
                continue
            try:
                status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield folder, name, status
            if stat.S_ISDIR(status.st_mode) and (below := enter(folder, name, status)) is not None:
                folders.append(below)
    finally:
        for folder in folders:
            folder.close()


def attributes(name: str, folder: int) -> list[str]:
    """The extended attributes of a directory; empty if the file system has none. Raises OSError."""
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=folder)
    try:
        return os.listxattr(descriptor)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return []
    finally:
        os.close(descriptor)


MAX_PATH_BYTES = 3500
"""Longest path that is packed: below the kernel's limit, because it is unpacked in another directory."""
MAX_HOLE_BYTES = 1 << 30
"""Most bytes of holes in all files of a layer: a tar file stores them as zeros."""
_WHITEOUT, _OPAQUE_MARK = ".wh.", ".wh..wh..opq"
_LITERAL = "ETUDE.literal"
"""Extended header of a file whose name merely looks like a whiteout's."""
_SECOND_NS = 10**9


class LayerError(Exception):
    """A packed layer that is truncated, or contains paths outside of itself."""


class UnpackableError(LayerError):
    """The agent's files cannot be packed."""


def pack_tree(root: str, file: IO[bytes], max_hole_bytes: int | None = MAX_HOLE_BYTES) -> None:
    """Writes a directory in overlayfs' format as a tar file in OCI's, sorted by path.

    `max_hole_bytes` None: no limit, for file systems whose compression looks like holes. Raises LayerError
    for files that a tar file cannot represent, and OSError.
    """
    links: dict[tuple[int, int], str] = {}
    hole_bytes = 0
    uppermost = os.open(root, DIRECTORY_FLAGS)
    entries = walk_tree(Folder(uppermost, "", os.fstat(uppermost)))
    with (
        contextlib.closing(entries),
        tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        if OPAQUE in attributes(".", uppermost):
            archive.addfile(tarfile.TarInfo(_OPAQUE_MARK))
        for folder, name, status in entries:
            if stat.S_ISREG(status.st_mode) and max_hole_bytes is not None:
                hole_bytes += max(0, status.st_size - status.st_blocks * 512)
            _check_packable(folder.prefix + name, hole_bytes)
            _pack_entry(archive, folder, name, status, links)


def _check_packable(path: str, hole_bytes: int) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UnpackableError(f"a path has more than {MAX_PATH_BYTES} bytes: {path[:80]!r}...")
    if hole_bytes > MAX_HOLE_BYTES:
        raise UnpackableError(
            f"the files have holes of more than {MAX_HOLE_BYTES} bytes, as of {path[:80]!r}"
        )


def _pack_entry(
    archive: tarfile.TarFile,
    folder: Folder,
    name: str,
    status: os.stat_result,
    links: dict[tuple[int, int], str],
) -> None:
    path = folder.prefix + name
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        archive.addfile(tarfile.TarInfo(f"{folder.prefix}{_WHITEOUT}{name}"))
        return
    info = _member(path, name, status)
    key = (status.st_dev, status.st_ino)
    if stat.S_ISREG(status.st_mode) and key in links:
        info.type, info.linkname = tarfile.LNKTYPE, links[key]
        archive.addfile(info)
    elif stat.S_ISFIFO(status.st_mode):
        info.type = tarfile.FIFOTYPE
        archive.addfile(info)
    else:
        add_entry(archive, info, name, folder.descriptor, status.st_mode)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        links.setdefault(key, path)
    if stat.S_ISDIR(status.st_mode) and OPAQUE in attributes(name, folder.descriptor):
        archive.addfile(tarfile.TarInfo(f"{path}/{_OPAQUE_MARK}"))


def add_entry(archive: tarfile.TarFile, info: tarfile.TarInfo, name: str, folder: int, mode: int) -> None:
    """Adds the entry `name` of a directory under the name in `info`, if it is a file, directory or link.
    Raises OSError."""
    if stat.S_ISREG(mode):
        with open(os.open(name, FILE_FLAGS, dir_fd=folder), "rb") as data:
            info.size = os.fstat(data.fileno()).st_size
            archive.addfile(info, data)
    elif stat.S_ISDIR(mode):
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    elif stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
        archive.addfile(info)


def _member(path: str, name: str, status: os.stat_result) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), status.st_mtime_ns // _SECOND_NS
    extended: dict[str, str] = {}
    if status.st_mtime_ns % _SECOND_NS:
        extended["mtime"] = _decimal(status.st_mtime_ns)
    if name.startswith(_WHITEOUT):
        extended[_LITERAL] = "1"
    info.pax_headers = extended
    return info


def _decimal(time_ns: int) -> str:
    seconds, rest = divmod(abs(time_ns), _SECOND_NS)
    return f"{'-' if time_ns < 0 else ''}{seconds}.{rest:09}"


def _times_ns(member: tarfile.TarInfo) -> tuple[int, int]:
    """(atime, mtime) in nanoseconds, a precision that `member.mtime`, a float, lacks."""
    whole, _, part = member.pax_headers.get("mtime", "").partition(".")
    if not (whole.removeprefix("-").isdecimal() and part.isdecimal()):
        time_ns = int(member.mtime) * _SECOND_NS
    else:
        time_ns = int(whole.removeprefix("-")) * _SECOND_NS + int(part[:9].ljust(9, "0"))
        time_ns = -time_ns if whole.startswith("-") else time_ns
    return time_ns, time_ns


def unpack_tree(file: IO[bytes], root: str) -> None:
    """The inverse of `pack_tree`, into an empty directory. Raises LayerError, OSError."""
    directories: list[tuple[str, int, tuple[int, int]]] = []
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                _unpack_member(archive, member, root, directories)
    except (tarfile.TarError, EOFError) as error:
        raise LayerError(f"the layer is torn: {error}") from error
    for path, mode, times_ns in reversed(directories):
        os.chmod(path, mode)
        os.utime(path, ns=times_ns)


def _unpack_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    root: str,
    directories: list[tuple[str, int, tuple[int, int]]],
) -> None:
    full = _place(root, member.name.rstrip("/"))
    folder, name = os.path.split(full)
    literal = _LITERAL in member.pax_headers
    if name == _OPAQUE_MARK and not literal:
        os.setxattr(folder, OPAQUE, b"y")
    elif name.startswith(_WHITEOUT) and not literal:
        hidden = name[len(_WHITEOUT) :]
        if hidden in ("", ".", ".."):
            raise LayerError(f"the layer names {member.name!r}")
        os.mknod(os.path.join(folder, hidden), stat.S_IFCHR, 0)
    elif member.isdir():
        os.mkdir(full, 0o700)
        directories.append((full, member.mode & 0o1777, _times_ns(member)))
    elif member.issym():
        os.symlink(member.linkname, full)
        os.utime(full, ns=_times_ns(member), follow_symlinks=False)
    elif member.islnk():
        os.link(_place(root, member.linkname), full, follow_symlinks=False)
    elif member.isfifo():
        os.mkfifo(full)
        os.chmod(full, member.mode & 0o777)
    elif member.isreg() and not member.issparse():
        _unpack_file(archive, member, full)
    else:
        raise LayerError(f"the layer holds {member.name!r} of type {member.type!r}")


def _place(root: str, path: str) -> str:
    """The path of a member. Raises LayerError if it is outside of `root`, by its name or through a link."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise LayerError(f"the layer names {path!r}")
    folder = os.path.join(root, *parts[:-1])
    if os.path.realpath(folder) != os.path.join(os.path.realpath(root), *parts[:-1]):
        raise LayerError(f"a link lies in the way of {path!r}")
    return os.path.join(folder, parts[-1])


def _unpack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, full: str) -> None:
    source = archive.extractfile(member)
    assert source is not None, "a regular member has contents"
    with open(full, "xb") as target:
        while data := source.read(1 << 20):
            target.write(data)
        os.fchmod(target.fileno(), member.mode & 0o777)
    if os.path.getsize(full) != member.size:
        raise LayerError(f"the layer is torn in {member.name!r}")
    os.utime(full, ns=_times_ns(member))
