"""Layers of files inside the fork server: copied out of a sandbox, merged, packed, unpacked, removed.

A layer is a directory `<layer>/root` (what a sandbox changed below its root or workspace, in overlayfs' own
form: whiteouts are character devices 0/0, opaque directories carry `user.overlay.opaque`) and
`<layer>/tmp`. Copies are made while the sandbox stands still, with `sendfile`: the bytes never enter this
process.

Packed, a layer is a tar file in OCI's form: `.wh.name` for a whiteout, `.wh..wh..opq` for an opaque
directory. Everything belongs to one user, so owners are not kept.

The agent made these trees: they may be deeper than any stack or path, full of holes, or one file under ten
thousand names. Nothing here recurses; what would not come back from a tar file is refused when it is packed.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

ROOT, TEMPORARY = "root", "tmp"
OPAQUE = "user.overlay.opaque"
MAX_PATH_BYTES = 3500
"""The longest path that is packed: less than the kernel takes, because it is unpacked below another one."""
MAX_HOLE_BYTES = 1 << 30
"""In all files of a packed layer together: a tar file has no holes."""
_WHITEOUT, _OPAQUE_MARK = ".wh.", ".wh..wh..opq"
_LITERAL = "ETUDE.literal"
"""Extended header of a file whose name only looks like a whiteout's."""
_SMALL_BYTES = 32 << 10
_SECOND_NS = 10**9
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LayerError(Exception):
    """A packed layer that is torn, or reaches outside itself; or a layer that cannot be packed."""


@dataclass
class _Folder:
    """A directory that is being gone through."""

    descriptor: int
    prefix: str
    """Its path with a slash at the end; empty for the uppermost."""
    status: os.stat_result
    copy: int = -1
    names: list[str] = field(default_factory=list)
    """What is still to be seen, last one first."""

    def __post_init__(self) -> None:
        self.names = sorted(os.listdir(self.descriptor), reverse=True)

    def enter(self, name: str, status: os.stat_result, copy: int = -1) -> _Folder:
        inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=self.descriptor)
        return _Folder(inner, f"{self.prefix}{name}/", status, copy)

    def close(self) -> None:
        os.close(self.descriptor)
        if self.copy >= 0:
            os.close(self.copy)


def copy_tree(source: int, target: int) -> None:
    """Copies everything below one directory descriptor into another, empty one.

    Never follows a link and never leaves `source`. Sockets are left out: nobody listens in a copy. Holes stay
    holes. Raises OSError.
    """
    links: dict[tuple[int, int], str] = {}

    def copy(folder: _Folder, name: str, status: os.stat_result) -> None:
        key = (status.st_dev, status.st_ino)
        if key in links:
            os.link(links[key], name, src_dir_fd=target, dst_dir_fd=folder.copy, follow_symlinks=False)
        elif _copy_entry(folder.descriptor, folder.copy, name, status) and status.st_nlink > 1:
            links[key] = folder.prefix + name

    _go_through(source, target, _copy_directory, copy)


def merge_tree(source: int, target: int, trash: int) -> None:
    """Lays one layer over another, so that the two together hide and show what they did one by one.

    Files are linked, not copied: nobody writes to a layer. What they replace goes to the directory `trash`.
    Raises OSError.
    """

    def enter(folder: _Folder, name: str) -> int:
        is_opaque = OPAQUE in _attributes(name, folder.descriptor)
        below = _mode(name, folder.copy)
        if stat.S_ISDIR(below) and not is_opaque:
            return os.open(name, _DIRECTORY_FLAGS, dir_fd=folder.copy)
        _discard(name, folder.copy, below, trash)
        os.mkdir(name, 0o700, dir_fd=folder.copy)
        copy = os.open(name, _DIRECTORY_FLAGS, dir_fd=folder.copy)
        if is_opaque or below:
            # What the replaced entry hid stays hidden.
            os.setxattr(copy, OPAQUE, b"y")
        return copy

    def link(folder: _Folder, name: str, status: os.stat_result) -> None:
        _discard(name, folder.copy, _mode(name, folder.copy), trash)
        os.link(name, name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.copy, follow_symlinks=False)

    _go_through(source, target, enter, link)


def _go_through(
    source: int,
    target: int,
    enter: Callable[[_Folder, str], int],
    visit: Callable[[_Folder, str, os.stat_result], None],
) -> None:
    """Calls `enter` for directories, which gives the descriptor of the copy, and `visit` for all else."""
    folders = [_Folder(os.dup(source), "", os.fstat(source), os.dup(target))]
    try:
        while folders:
            folder = folders[-1]
            if not folder.names:
                if folder.prefix:
                    _finish(folder.copy, folder.status)
                folders.pop().close()
                continue
            name = folder.names.pop()
            status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                folders.append(folder.enter(name, status, enter(folder, name)))
            else:
                visit(folder, name, status)
    finally:
        for folder in folders:
            folder.close()


def _mode(name: str, folder: int) -> int:
    """Mode of an entry; 0 if there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _discard(name: str, folder: int, mode: int, trash: int) -> None:
    if stat.S_ISDIR(mode):
        os.rename(name, str(len(os.listdir(trash))), src_dir_fd=folder, dst_dir_fd=trash)
    elif mode:
        os.unlink(name, dir_fd=folder)


def _copy_directory(folder: _Folder, name: str) -> int:
    os.mkdir(name, 0o700, dir_fd=folder.copy)
    copy = os.open(name, _DIRECTORY_FLAGS, dir_fd=folder.copy)
    if OPAQUE in _attributes(name, folder.descriptor):
        os.setxattr(copy, OPAQUE, b"y")
    return copy


def _finish(descriptor: int, status: os.stat_result) -> None:
    """Mode and times of a directory: last, because filling it needs the one and changes the others."""
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
    os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))


def _attributes(name: str, folder: int) -> list[str]:
    descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=folder)
    try:
        return os.listxattr(descriptor)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return []
    finally:
        os.close(descriptor)


def _copy_entry(here: int, there: int, name: str, status: os.stat_result) -> bool:
    """Copies what is no directory. False if it is left out."""
    if stat.S_ISREG(status.st_mode):
        _copy_file(here, there, name, status)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=there, follow_symlinks=False)
    elif stat.S_ISFIFO(status.st_mode):
        os.mkfifo(name, dir_fd=there)
        os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=there)
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=there)
    else:
        return False
    return True


def _copy_file(here: int, there: int, name: str, status: os.stat_result) -> None:
    reader = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        writer = os.open(name, flags, 0o600, dir_fd=there)
        try:
            if status.st_size <= _SMALL_BYTES:
                os.write(writer, os.read(reader, status.st_size))
            else:
                _copy_data(reader, writer, status.st_size)
            os.utime(writer, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fchmod(writer, stat.S_IMODE(status.st_mode))
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def _copy_data(reader: int, writer: int, size: int) -> None:
    """Copies what is no hole."""
    os.ftruncate(writer, size)
    end = 0
    while end < size:
        try:
            start = os.lseek(reader, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        end = min(size, os.lseek(reader, start, os.SEEK_HOLE))
        os.lseek(reader, start, os.SEEK_SET)
        os.lseek(writer, start, os.SEEK_SET)
        left = end - start
        while left > 0 and (sent := os.sendfile(writer, reader, None, left)):
            left -= sent


def remove_tree(directory: str) -> None:
    """Removes a directory with all that it holds, if it is there. Raises OSError.

    Every directory is moved up before it is emptied, so that no depth is too much.
    """
    hold = f"{directory}.doomed"
    os.makedirs(hold, exist_ok=True)
    number = 0
    try:
        os.rename(directory, f"{hold}/0")
        pending = [0]
    except FileNotFoundError:
        pending = []
    while pending:
        folder = f"{hold}/{pending.pop()}"
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            number += 1
            os.rename(entry.path, f"{hold}/{number}")
            pending.append(number)
        os.rmdir(folder)
    os.rmdir(hold)


def is_empty(directory: str) -> bool:
    """Whether a directory has no entries."""
    with os.scandir(directory) as entries:
        return next(entries, None) is None


def pack_tree(root: str, file: IO[bytes]) -> None:
    """Writes a directory in overlayfs' form as a tar file in OCI's, sorted by path.

    Raises LayerError for what a tar file cannot give back, and OSError.
    """
    links: dict[tuple[int, int], str] = {}
    hole_bytes = 0
    uppermost = os.open(root, _DIRECTORY_FLAGS)
    folders = [_Folder(uppermost, "", os.fstat(uppermost))]
    try:
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            while folders:
                folder = folders[-1]
                if not folder.names:
                    folders.pop().close()
                    continue
                name = folder.names.pop()
                status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    hole_bytes += max(0, status.st_size - status.st_blocks * 512)
                _check_packable(folder.prefix + name, hole_bytes)
                _pack_entry(archive, folder, name, status, links)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(folder.enter(name, status))
    finally:
        for folder in folders:
            folder.close()


def _check_packable(path: str, hole_bytes: int) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise LayerError(f"a path has more than {MAX_PATH_BYTES} bytes: {path[:80]!r}...")
    if hole_bytes > MAX_HOLE_BYTES:
        raise LayerError(f"the files have holes of more than {MAX_HOLE_BYTES} bytes, as of {path[:80]!r}")


def _pack_entry(
    archive: tarfile.TarFile,
    folder: _Folder,
    name: str,
    status: os.stat_result,
    links: dict[tuple[int, int], str],
) -> None:
    path = folder.prefix + name
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        archive.addfile(tarfile.TarInfo(f"{folder.prefix}{_WHITEOUT}{name}"))
        return
    info = _member(path, name, status)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
        if OPAQUE in _attributes(name, folder.descriptor):
            archive.addfile(tarfile.TarInfo(f"{path}/{_OPAQUE_MARK}"))
    elif stat.S_ISREG(status.st_mode):
        key = (status.st_dev, status.st_ino)
        if key in links:
            info.type, info.linkname = tarfile.LNKTYPE, links[key]
            archive.addfile(info)
            return
        if status.st_nlink > 1:
            links[key] = path
        info.size = status.st_size
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=folder.descriptor), "rb") as data:
            archive.addfile(info, data)
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder.descriptor)
        archive.addfile(info)
    elif stat.S_ISFIFO(status.st_mode):
        info.type = tarfile.FIFOTYPE
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
    """Times to the nanosecond, which `member.mtime`, a float, does not hold."""
    whole, _, part = member.pax_headers.get("mtime", "").partition(".")
    if not (whole.removeprefix("-").isdecimal() and part.isdecimal()):
        time_ns = int(member.mtime) * _SECOND_NS
    else:
        time_ns = int(whole.removeprefix("-")) * _SECOND_NS + int(part[:9].ljust(9, "0"))
        time_ns = -time_ns if whole.startswith("-") else time_ns
    return time_ns, time_ns


def unpack_tree(file: IO[bytes], root: str) -> None:
    """The reverse of `pack_tree`, into an empty directory. Raises LayerError, OSError."""
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
    """Where a member belongs. Raises LayerError for what leads out, by its name or through a link."""
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
