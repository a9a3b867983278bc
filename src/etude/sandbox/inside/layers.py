"""Layers of files in the fork server: copied from a sandbox, merged, removed.

A layer is a directory `<layer>/root` (what a sandbox changed below its root or workspace, in overlayfs' own
form: whiteouts are character devices 0/0, opaque directories carry `user.overlay.opaque`) and
`<layer>/tmp`. Copies are made while the sandbox is frozen, with `sendfile`: the bytes never enter this
process.

Packed, a layer is a tar file: see packing.py.

The agent made these trees: they may be deeper than any stack or path limit, sparse, or one file with ten
thousand hard links. No function here recurses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from etude.sandbox.inside.packing import DIRECTORY_FLAGS, OPAQUE, Folder, attributes, walk_tree

ROOT, TEMPORARY = "root", "tmp"
_SMALL_BYTES = 32 << 10


def copy_tree(source: int, target: int) -> None:
    """Copies everything below one directory descriptor into another, empty one.

    Never follows a link and never leaves `source`. Sockets are left out: a copy has no listeners. Holes are
    preserved. Raises OSError.
    """
    links: dict[tuple[int, int], str] = {}

    def copy(folder: Folder, name: str, status: os.stat_result) -> None:
        key = (status.st_dev, status.st_ino)
        if key in links:
            os.link(links[key], name, src_dir_fd=target, dst_dir_fd=folder.copy, follow_symlinks=False)
        elif _copy_entry(folder.descriptor, folder.copy, name, status) and status.st_nlink > 1:
            links[key] = folder.prefix + name

    _copy_walk(source, target, _copy_directory, copy)


def merge_tree(source: int, target: int, trash: int) -> None:
    """Merges an upper layer into a lower one, with the same visible files as the two stacked.

    Files are linked, not copied: layers are never written to. Replaced directories are moved to `trash`.
    Raises OSError.
    """

    def enter(folder: Folder, name: str) -> int:
        is_opaque = OPAQUE in attributes(name, folder.descriptor)
        below = _mode(name, folder.copy)
        if stat.S_ISDIR(below) and not is_opaque:
            return os.open(name, DIRECTORY_FLAGS, dir_fd=folder.copy)
        _discard(name, folder.copy, below, trash)
        os.mkdir(name, 0o700, dir_fd=folder.copy)
        copy = os.open(name, DIRECTORY_FLAGS, dir_fd=folder.copy)
        if is_opaque or below:
            # Entries that the replaced one hid stay hidden.
            os.setxattr(copy, OPAQUE, b"y")
        return copy

    def link(folder: Folder, name: str, status: os.stat_result) -> None:
        _discard(name, folder.copy, _mode(name, folder.copy), trash)
        os.link(name, name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.copy, follow_symlinks=False)

    _copy_walk(source, target, enter, link)


def _copy_walk(
    source: int,
    target: int,
    enter: Callable[[Folder, str], int],
    visit: Callable[[Folder, str, os.stat_result], None],
) -> None:
    """Walks `source`: `enter` makes the copy of a directory and returns it; `visit` handles all else."""
    top = Folder(os.dup(source), "", os.fstat(source), os.dup(target))
    entries = walk_tree(top, enter=lambda f, name, s: f.enter(name, s, enter(f, name)), leave=_finish)
    with contextlib.closing(entries):
        for folder, name, status in entries:
            if not stat.S_ISDIR(status.st_mode):
                visit(folder, name, status)


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


def _copy_directory(folder: Folder, name: str) -> int:
    os.mkdir(name, 0o700, dir_fd=folder.copy)
    copy = os.open(name, DIRECTORY_FLAGS, dir_fd=folder.copy)
    if OPAQUE in attributes(name, folder.descriptor):
        os.setxattr(copy, OPAQUE, b"y")
    return copy


def _finish(folder: Folder) -> None:
    """Sets mode and times of a directory, once it is filled, which needs the mode and changes the times."""
    if folder.prefix:
        os.fchmod(folder.copy, stat.S_IMODE(folder.status.st_mode))
        os.utime(folder.copy, ns=(folder.status.st_atime_ns, folder.status.st_mtime_ns))
    folder.close()


def _copy_entry(here: int, there: int, name: str, status: os.stat_result) -> bool:
    """Copies an entry that is not a directory. False if it is left out."""
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
    """Copies the data of a file, without its holes."""
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
    """Removes a directory and its contents, if it exists. Raises OSError.

    Every directory is moved to the top before it is emptied, so that any depth works.
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
