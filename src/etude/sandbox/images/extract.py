"""Extracts a layer's archive into a directory in overlayfs' format of lower layers (with `userxattr`).

A deleted file is a character device 0/0; a directory that hides its counterparts in lower layers has the
extended attribute `user.overlay.opaque=y`. Archives are untrusted: every path is walked component by
component from the layer's own directory, and no symbolic link is followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from pathlib import Path

from etude.errors import EtudeError, ResourceError, SandboxError
from etude.kit.durable import FULL
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.archives import CHUNK_BYTES

WHITEOUT_PREFIX = b".wh."
OPAQUE_MARKER = b".wh..wh..opq"
OPAQUE_XATTR = "user.overlay.opaque"
MAX_NAME_BYTES = 2048
MAX_DEPTH = 256
MAX_MTIME_S = 8**11 - 1
"""The largest time that a tar header can represent."""
_AUFS_PREFIX = b".wh..wh."
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Parts = tuple[bytes, ...]


class Extractor:
    """Extracts entries below `root`, an empty directory, and makes them the property of `owner` (uid, gid).

    Devices and named pipes are left out, as a sandbox has no use for them. Set-user-id bits are dropped and
    the owner's read and write rights (for directories, execute too) added: a sandbox has a single user, who
    may read everything. Raises TemplateError for an archive that is damaged or leaves the layer,
    ResourceError for missing capabilities of this machine; the caller removes what was extracted by then.
    """

    def __init__(self, root: Path, owner: tuple[int, int], max_entries: int, name: str) -> None:
        self._owner = owner
        self._max_entries = max_entries
        self._name = name
        self._root = os.open(root, _OPEN_DIRECTORY)
        self._parent: tuple[Parts, int] | None = None
        self._directories: dict[Parts, int] = {}
        self._whiteouts: set[Parts] = set()
        self._num_implied = 0
        """Directories that no entry names: each costs as much as an entry, and an entry may need hundreds."""

    def run(self, archive: tarfile.TarFile) -> None:
        """Extracts every entry. Blocks."""
        num_entries = 0
        try:
            while (entry := archive.next()) is not None:
                # Else the library keeps an object of every entry in memory.
                archive.members.clear()  # type: ignore[attr-defined]
                num_entries += 1
                if num_entries + self._num_implied > self._max_entries:
                    raise self._refusal(entry, f"more than {self._max_entries} entries")
                try:
                    self._extract(entry, archive)
                except OSError as error:
                    raise storage_error(error, self._name, _shown(_bytes(entry.name))) from error
            self._set_directory_times()
        finally:
            self._close_parent()
            os.close(self._root)

    def _extract(self, entry: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        parts = self._split(_bytes(entry.name), entry)
        if not parts:
            if not entry.isdir():
                raise self._refusal(entry, "an entry without a name")
            self._set_directory((), self._root, entry.mode, _time_s(entry))
        elif not entry.isdev():
            parent = self._enter(parts[:-1])
            if parts[-1].startswith(WHITEOUT_PREFIX):
                self._whiteout(parts, parent, entry)
            elif entry.isdir():
                self._directory(parts, parent, entry)
            elif entry.issym():
                self._symlink(parts, parent, entry)
            elif entry.islnk():
                self._hardlink(parts, parent, entry)
            elif entry.isreg() and not entry.issparse():
                self._file(parts, parent, entry, archive)
            else:
                raise self._refusal(entry, f"an entry of type {entry.type!r}")

    def _split(self, name: bytes, entry: tarfile.TarInfo) -> Parts:
        """The components of a name, relative to the layer's root even if the name is absolute."""
        parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
        if b".." in parts or b"\0" in name:
            raise self._refusal(entry, "a path that leaves the layer")
        if len(name) > MAX_NAME_BYTES or len(parts) > MAX_DEPTH:
            raise self._refusal(entry, "a path that is too long or too deep")
        if any(part.startswith(WHITEOUT_PREFIX) for part in parts[:-1]):
            raise self._refusal(entry, "a directory with a name that only whiteouts may have")
        return parts

    def _enter(self, parts: Parts, make: bool = True) -> int:
        """Descriptor of a directory, valid until the next call. Creates it and its parents if missing;
        without `make` raises OSError then."""
        if self._parent is not None and self._parent[0] == parts:
            return self._parent[1]
        self._close_parent()
        here = os.dup(self._root)
        try:
            for depth in range(len(parts)):
                if make:
                    below = self._step(here, parts[: depth + 1])
                else:
                    below = os.open(parts[depth], _OPEN_DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        self._parent = (parts, here)
        return here

    def _step(self, parent: int, parts: Parts) -> int:
        name = parts[-1]
        try:
            return os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            os.mkdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            if not is_whiteout(os.stat(name, dir_fd=parent, follow_symlinks=False)):
                raise TemplateError(
                    "a path leads through an entry of the same layer that is not a directory",
                    field=self._name, received=_shown(b"/".join(parts)),
                    fix="write real paths into the layer: its links are not followed",
                ) from error  # fmt: skip
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, dir_fd=parent)
        self._num_implied += 1
        here = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
        self._set_directory(parts, here, 0o755, 0)
        return here

    def _directory(self, parts: Parts, parent: int, entry: tarfile.TarInfo) -> None:
        there = self._stat(parts[-1], parent)
        if there is None or not stat.S_ISDIR(there.st_mode):
            if there is not None:
                os.unlink(parts[-1], dir_fd=parent)
            os.mkdir(parts[-1], dir_fd=parent)
        here = os.open(parts[-1], _OPEN_DIRECTORY, dir_fd=parent)
        try:
            self._set_directory(parts, here, entry.mode, _time_s(entry))
        finally:
            os.close(here)

    def _set_directory(self, parts: Parts, here: int, mode: int, mtime_s: int) -> None:
        os.fchmod(here, mode & 0o1777 | 0o700)
        set_owner(here, self._owner)
        if parts in self._whiteouts:
            mark_opaque(here)
        self._directories[parts] = mtime_s

    def _file(self, parts: Parts, parent: int, entry: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        self._clear(parts, parent)
        contents = archive.extractfile(entry)
        assert contents is not None, "a regular entry has contents"
        here = os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=parent)
        try:
            while chunk := contents.read(CHUNK_BYTES):
                view = memoryview(chunk)
                while view:
                    view = view[os.write(here, view) :]
            set_owner(here, self._owner)
            os.fchmod(here, entry.mode & 0o777 | 0o600)
            _set_time(here, _time_s(entry))
        finally:
            os.close(here)

    def _symlink(self, parts: Parts, parent: int, entry: tarfile.TarInfo) -> None:
        if not entry.linkname or "\0" in entry.linkname:
            raise self._refusal(entry, "a symbolic link without a target")
        self._clear(parts, parent)
        os.symlink(_bytes(entry.linkname), parts[-1], dir_fd=parent)
        set_owner(parts[-1], self._owner, parent)
        moment = (_time_s(entry) * 10**9, _time_s(entry) * 10**9)
        os.utime(parts[-1], ns=moment, dir_fd=parent, follow_symlinks=False)

    def _hardlink(self, parts: Parts, parent: int, entry: tarfile.TarInfo) -> None:
        target = self._split(_bytes(entry.linkname), entry)
        if target == parts:
            return
        self._clear(parts, parent)
        parent = os.dup(parent)
        try:
            there = self._stat(target[-1], self._enter(target[:-1])) if target else None
            if there is None or not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
                raise self._refusal(entry, "a hard link to something other than a file of this layer")
            os.link(
                target[-1], parts[-1], src_dir_fd=self._enter(target[:-1]), dst_dir_fd=parent,
                follow_symlinks=False,
            )  # fmt: skip
        finally:
            os.close(parent)

    def _whiteout(self, parts: Parts, parent: int, entry: tarfile.TarInfo) -> None:
        if parts[-1] == OPAQUE_MARKER:
            mark_opaque(parent)
            self._whiteouts.add(parts[:-1])
            return
        if parts[-1].startswith(_AUFS_PREFIX):
            return
        name = parts[-1][len(WHITEOUT_PREFIX) :]
        if name in (b"", b".", b".."):
            raise self._refusal(entry, "a whiteout that names no file")
        hidden = (*parts[:-1], name)
        self._whiteouts.add(hidden)
        there = self._stat(name, parent)
        if there is None:
            make_whiteout(name, parent)
            set_owner(name, self._owner, parent)
        elif stat.S_ISDIR(there.st_mode):
            # A whiteout hides what lower layers hold, never what its own layer adds.
            mark_opaque(self._enter(hidden))

    def _clear(self, parts: Parts, parent: int) -> None:
        """Removes an earlier entry of the same name."""
        there = self._stat(parts[-1], parent)
        if there is None:
            return
        if not stat.S_ISDIR(there.st_mode):
            os.unlink(parts[-1], dir_fd=parent)
            return
        shutil.rmtree(parts[-1], dir_fd=parent)

    def _stat(self, name: bytes, parent: int) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _set_directory_times(self) -> None:
        """Sets directories' times last, because every new entry changes that of its directory."""
        for parts, mtime_s in self._directories.items():
            try:
                _set_time(self._enter(parts, make=False), mtime_s)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise storage_error(error, self._name, _shown(b"/".join(parts))) from error
                # Else a later entry replaced it.

    def _close_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _refusal(self, entry: tarfile.TarInfo, reason: str) -> TemplateError:
        return TemplateError(
            f"the archive holds {reason}", field=self._name, received=_shown(_bytes(entry.name)),
            fix="use an archive from a source that you trust",
        )  # fmt: skip


def set_owner(file: int | bytes, owner: tuple[int, int], parent: int | None = None) -> None:
    """Sets the owner of a file (a descriptor, or a name in `parent`). Raises ResourceError if refused."""
    if owner == (os.geteuid(), os.getegid()):
        return
    try:
        if isinstance(file, int):
            os.fchown(file, *owner)
        else:
            os.chown(file, *owner, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise
        raise ResourceError(
            "the owner of layer files cannot be set to the sandboxes' user",
            field="layer store", received=owner,
            fix="map that user id into this container, or run as an unprivileged user",
        ) from error  # fmt: skip


def is_whiteout(status: os.stat_result) -> bool:
    """Whether a file marks a deleted one."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def make_whiteout(name: bytes, parent: int) -> None:
    """Makes a whiteout in the directory `parent`. Raises ResourceError if the kernel refuses."""
    try:
        os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=parent)
    except PermissionError as error:
        raise ResourceError(
            "the kernel does not let this user create whiteouts (character devices 0/0)",
            field="layer store", received=_shown(name),
            fix="use Linux 5.8 or later, or put the store on a file system that is not mounted nodev",
        ) from error  # fmt: skip


def mark_opaque(directory: int) -> None:
    """Hides a directory's entries of lower layers. Raises ResourceError without extended attributes."""
    try:
        os.setxattr(directory, OPAQUE_XATTR, b"y")
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise ResourceError(
            "the layer store's file system lacks user extended attributes",
            field="layer store", fix="put the store on ext4, xfs or btrfs (or tmpfs from Linux 6.6 on)",
        ) from error  # fmt: skip


def storage_error(error: OSError, field: str, received: object) -> EtudeError:
    """The typed error for a system call that failed on the store's files."""
    if error.errno in FULL:
        return ResourceError(
            "no space left for layers",
            field=field,
            received=received,
            fix="free disk space, or remove images",
        )
    if error.errno in (errno.ENAMETOOLONG, errno.EMLINK, errno.EILSEQ, errno.EINVAL):
        return TemplateError(
            f"this file system cannot hold the entry: {error.strerror}", field=field, received=received
        )
    return SandboxError(f"the layer store failed: {error}", field=field, received=received)


def _set_time(descriptor: int, mtime_s: int) -> None:
    os.utime(descriptor, ns=(mtime_s * 10**9, mtime_s * 10**9))


def _time_s(entry: tarfile.TarInfo) -> int:
    return min(max(int(entry.mtime), 0), MAX_MTIME_S)


def _bytes(name: str) -> bytes:
    """The bytes of a name in the archive."""
    return name.encode(errors="surrogateescape")


def _shown(name: bytes) -> str:
    return name[:200].decode(errors="replace")
