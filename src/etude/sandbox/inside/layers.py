"""Layers of files inside the fork server: copied out of a sandbox, packed, unpacked.

A layer is a directory `<layer>/root` (what a sandbox changed below its root or workspace, in overlayfs' own
form: whiteouts are character devices 0/0, opaque directories carry `user.overlay.opaque`) and
`<layer>/tmp`. Copies are made while the sandbox stands still, with `sendfile`: the bytes never enter this
process.

Packed, a layer is a tar file in OCI's form: `.wh.name` for a whiteout, `.wh..wh..opq` for an opaque
directory. Everything belongs to one user, so owners are not kept.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import IO

ROOT, TEMPORARY = "root", "tmp"
OPAQUE = "user.overlay.opaque"
_WHITEOUT, _OPAQUE_MARK = ".wh.", ".wh..wh..opq"
_SMALL_BYTES = 32 << 10


class LayerError(Exception):
    """A packed layer that is torn, or reaches outside itself."""


def copy_tree(source: int, target: int) -> None:
    """Copies everything below one directory descriptor into another, empty one.

    Never follows a link and never leaves `source`. Sockets are left out: nobody listens in a copy.
    """
    links: dict[tuple[int, int], str] = {}
    pending = [(os.dup(source), os.dup(target), "")]
    while pending:
        here, there, prefix = pending.pop()
        try:
            for entry in os.scandir(here):
                status = entry.stat(follow_symlinks=False)
                name = entry.name
                if stat.S_ISDIR(status.st_mode):
                    pending.append((*_copy_directory(here, there, name, status), f"{prefix}{name}/"))
                    continue
                key = (status.st_dev, status.st_ino)
                if status.st_nlink > 1 and key in links:
                    os.link(links[key], name, src_dir_fd=target, dst_dir_fd=there, follow_symlinks=False)
                    continue
                if _copy_entry(here, there, name, status) and status.st_nlink > 1:
                    links[key] = prefix + name
        finally:
            os.close(here)
            os.close(there)


def _copy_directory(here: int, there: int, name: str, status: os.stat_result) -> tuple[int, int]:
    os.mkdir(name, 0o700, dir_fd=there)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    inner, copy = os.open(name, flags, dir_fd=here), os.open(name, flags, dir_fd=there)
    if OPAQUE in os.listxattr(inner):
        os.setxattr(copy, OPAQUE, b"y")
    os.fchmod(copy, stat.S_IMODE(status.st_mode))
    return inner, copy


def _copy_entry(here: int, there: int, name: str, status: os.stat_result) -> bool:
    """Copies what is no directory. False if it is left out."""
    if stat.S_ISREG(status.st_mode):
        _copy_file(here, there, name, status)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=there, follow_symlinks=False)
    elif stat.S_ISFIFO(status.st_mode):
        os.mkfifo(name, stat.S_IMODE(status.st_mode), dir_fd=there)
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=there)
    else:
        return False
    return True


def _copy_file(here: int, there: int, name: str, status: os.stat_result) -> None:
    reader = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    writer = os.open(name, flags, stat.S_IMODE(status.st_mode), dir_fd=there)
    try:
        left = status.st_size
        if left <= _SMALL_BYTES:
            os.write(writer, os.read(reader, left))
            left = 0
        while left > 0 and (sent := os.sendfile(writer, reader, None, left)):
            left -= sent
        os.utime(writer, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fchmod(writer, stat.S_IMODE(status.st_mode))
    finally:
        os.close(reader)
        os.close(writer)


def is_empty(directory: str) -> bool:
    """Whether a directory has no entries."""
    with os.scandir(directory) as entries:
        return next(entries, None) is None


def pack_tree(root: str, file: IO[bytes]) -> None:
    """Writes a directory in overlayfs' form as a tar file in OCI's, sorted by path."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _pack_below(archive, root, "")


def _pack_below(archive: tarfile.TarFile, root: str, prefix: str) -> None:
    for name in sorted(os.listdir(os.path.join(root, prefix))):
        relative = prefix + name
        full = os.path.join(root, relative)
        status = os.lstat(full)
        info = tarfile.TarInfo(relative)
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
        if stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
            if OPAQUE in os.listxattr(full, follow_symlinks=False):
                archive.addfile(tarfile.TarInfo(f"{relative}/{_OPAQUE_MARK}"))
            _pack_below(archive, root, relative + "/")
        elif stat.S_ISREG(status.st_mode):
            info.size = status.st_size
            with open(full, "rb") as data:
                archive.addfile(info, data)
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(full)
            archive.addfile(info)
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
            archive.addfile(info)
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            archive.addfile(tarfile.TarInfo(f"{prefix}{_WHITEOUT}{name}"))


def unpack_tree(file: IO[bytes], root: str) -> None:
    """The reverse of `pack_tree`, into an empty directory. Raises LayerError, OSError."""
    modes: list[tuple[str, int]] = []
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                _unpack_member(archive, member, root, modes)
    except (tarfile.TarError, EOFError) as error:
        raise LayerError(f"the layer is torn: {error}") from error
    for path, mode in reversed(modes):
        os.chmod(path, mode)


def _unpack_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, root: str, modes: list[tuple[str, int]]
) -> None:
    parts = member.name.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise LayerError(f"the layer names {member.name!r}")
    folder, name = os.path.join(root, *parts[:-1]), parts[-1]
    if os.path.realpath(folder) != os.path.join(os.path.realpath(root), *parts[:-1]):
        raise LayerError(f"a link lies in the way of {member.name!r}")
    full = os.path.join(folder, name)
    if name == _OPAQUE_MARK:
        os.setxattr(folder, OPAQUE, b"y")
    elif name.startswith(_WHITEOUT):
        os.mknod(os.path.join(folder, name[len(_WHITEOUT) :]), stat.S_IFCHR, 0)
    elif member.isdir():
        os.mkdir(full, 0o700)
        modes.append((full, member.mode & 0o1777))
    elif member.issym():
        os.symlink(member.linkname, full)
    elif member.isfifo():
        os.mkfifo(full, member.mode & 0o777)
    elif member.isreg():
        _unpack_file(archive, member, full)
    else:
        raise LayerError(f"the layer holds {member.name!r} of type {member.type!r}")


def _unpack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, full: str) -> None:
    source = archive.extractfile(member)
    assert source is not None, "a regular member has contents"
    with open(full, "xb") as target:
        while data := source.read(1 << 20):
            target.write(data)
        os.fchmod(target.fileno(), member.mode & 0o777)
    if os.path.getsize(full) != member.size:
        raise LayerError(f"the layer is torn in {member.name!r}")
    os.utime(full, (member.mtime, member.mtime))
