"""User and group ids of sandboxes on the host: each sandbox is a user of its own, if spare ids are available.

The kernel limits descriptors in flight, pages of pipes and epoll watches per user: one of several sandboxes
of the same user can exhaust them for all. So a fork server reserves a block of ids that no other one has, and
assigns one to each sandbox, as user and as group:

    the host                    fork server's namespace    first process's        the sandbox's own
    an id of the block          0 to 4095                  65534                  1000, or its image's user
    the fork server's user      65534                      1

Templates, saved layers and images are owned by the fork server's user. A sandbox sees them as its own, in
idmapped mounts, so that a layer of one sandbox can be used by any other. Without spare ids all sandboxes are
one user, as are those with an image whose file system has no idmapped mounts.

A separate process, the mapper, writes the id maps and mounts images: it keeps the rights that the launcher
gives up.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from etude.sandbox.inside import kernel
from etude.sandbox.inside.rights import NOBODY

BLOCK = 4096
"""Number of ids of one fork server, and so the most sandboxes at a time."""
SERVER = SANDBOX = NOBODY
"""The owner of files in the fork server's namespace, and the sandbox's user in that of its first process: the
same number, which also owns the files of images on disk."""
SERVER_IN_FIRST = 1
"""The fork server's user in the namespace of a first process; not 0, which would lose its rights."""


@dataclass(frozen=True)
class SpareIds:
    """Unused ids of the host, and the programs that map them for a plain user."""

    first_uid: int
    first_gid: int
    num: int
    programs: tuple[str, ...] = ()
    """Paths of newuidmap and newgidmap. Empty: the launcher is root."""

    def to_arguments(self) -> list[str]:
        """The ids as arguments of the launcher."""
        return [str(self.first_uid), str(self.first_gid), str(self.num), *self.programs]

    @classmethod
    def from_arguments(cls, words: Sequence[str]) -> SpareIds:
        """The inverse of `to_arguments`."""
        first_uid, first_gid, num = map(int, words[:3])
        return cls(first_uid, first_gid, num, tuple(words[3:]))


class Users:
    """Assigns the ids of one fork server to its sandboxes."""

    def __init__(self, mapper: socket.socket | None, mapper_pid: int, has_images: bool) -> None:
        """`mapper`: socket to the mapper; None: all sandboxes are the fork server's user."""
        self._mapper = mapper
        self._mapper_pid = mapper_pid
        self._has_images = has_images
        self._free = deque(range(BLOCK))
        self._taken: dict[int, int] = {}
        """Process id of a first process -> assigned id."""

    def map_server(self, uid: int, gid: int) -> None:
        """Maps the ids of this process into the user namespace that it has created. Raises OSError."""
        if self._mapper is None:
            kernel.write_maps(SERVER, uid, gid)
            return
        self._mapper.send(b"map")
        answer = self._mapper.recv(4096)
        if answer != b"done":
            raise OSError(
                errno.EPERM, f"no ids for sandboxes: {answer.decode() or 'the mapping process ended'}"
            )
        if not self._has_images:
            os.waitpid(self._mapper_pid, 0)

    def assign_ids(self, pid: int, files: str) -> list[int]:
        """Assigns ids to a first process; returns descriptors of idmapped mounts for it: of `files`, and of
        images if there are any. Raises OSError."""
        if self._mapper is None:
            kernel.map_ids(pid, f"{SANDBOX} {SERVER} 1", f"{SANDBOX} {SERVER} 1")
            return []
        if not self._free:
            raise OSError(errno.EAGAIN, f"at most {BLOCK} sandboxes at a time")
        number = self._taken[pid] = self._free.popleft()
        rows = f"{SANDBOX} {number} 1\n{SERVER_IN_FIRST} {SERVER} 1"
        kernel.map_ids(pid, rows, rows)
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return [kernel.copy_mount(files, namespace), *self._images(namespace)]
        finally:
            os.close(namespace)

    def _images(self, namespace: int) -> list[int]:
        if not self._has_images or self._mapper is None:
            return []
        socket.send_fds(self._mapper, [b"images"], [namespace])
        _, copies, _, _ = socket.recv_fds(self._mapper, 16, 1, socket.MSG_CMSG_CLOEXEC)
        self._has_images = bool(copies)
        return copies

    def release(self, pid: int) -> None:
        """Frees the ids of a first process that has ended, with all its descendants."""
        if pid in self._taken:
            self._free.append(self._taken.pop(pid))

    def close(self) -> None:
        """Closes the mapper's socket, in a first process."""
        if self._mapper is not None:
            self._mapper.close()


def become_own_user(mounts: Mapping[str, int], needed: str) -> None:
    """Changes a first process to its assigned user, if the mount `needed` is among the idmapped ones.

    `mounts`: target -> descriptor from `assign_ids`. Raises OSError.
    """
    if needed not in mounts:
        for copy in mounts.values():
            os.close(copy)
        return
    os.setresgid(SANDBOX, SANDBOX, SANDBOX)
    os.setresuid(SANDBOX, SANDBOX, SANDBOX)
    # Changing ids made /proc/self owned by root, and the maps unwritable.
    kernel.set_dumpable(True)
    for target, copy in mounts.items():
        kernel.move_mount(copy, target)


def mount_as_own(source: str, target: str) -> None:
    """Mounts a directory writable for sandboxes, as the real root: its owner is mapped to the fork server's
    user. Raises OSError, EINVAL where the file system has no idmapped mounts."""
    status = os.stat(source)
    pid = kernel.clone(kernel.NEWUSER)
    if pid == 0:
        while True:
            signal.pause()
    try:
        kernel.map_ids(pid, f"{status.st_uid} {NOBODY} 1", f"{status.st_gid} {NOBODY} 1")
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            kernel.move_mount(kernel.copy_mount(source, namespace, read_only=False), target)
        finally:
            os.close(namespace)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def reserve_ids(words: Sequence[str], images: str) -> tuple[Users, socket.socket | None]:
    """Reserves a block of spare ids (`SpareIds.to_arguments`; none: shared) for a fork server.

    Starts the mapper. The returned socket locks the block: keep it open until every process with these ids
    has ended. `images`: directory of the layer store, or empty. Raises OSError.
    """
    if not words:
        return Users(None, 0, False), None
    spare = SpareIds.from_arguments(words)
    offset, lock = _reserve_block(spare)
    has_images = bool(images) and not spare.programs  # only root may idmap files of the host
    mapper, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            kernel.die_with_parent()
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, 1 << 16)
            _serve_as_mapper(theirs, lambda: _map(spare, offset, launcher), images if has_images else "")
        finally:
            os._exit(0)
    theirs.close()
    return Users(mapper, pid, has_images), lock


def _reserve_block(spare: SpareIds) -> tuple[int, socket.socket]:
    """Offset of a free block, and an abstract socket that locks it until its last holder closes it.

    The search starts at a random block, since processes in other network namespaces do not see these locks.
    """
    num_blocks = spare.num // BLOCK
    start = int.from_bytes(os.urandom(4), "little")
    for step in range(num_blocks):
        offset = (start + step) % num_blocks * BLOCK
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0etude-ids-{spare.first_uid + offset}")
            return offset, lock
        except OSError:
            lock.close()
    raise OSError(errno.EAGAIN, f"other fork servers have all {spare.num} spare ids, {BLOCK} each")


def _map(spare: SpareIds, offset: int, launcher: int) -> None:
    """Writes the launcher's id maps. Raises OSError."""
    is_root = os.geteuid() == 0
    uid, gid = (NOBODY, NOBODY) if is_root else (os.getuid(), os.getgid())
    maps = (
        [SERVER, uid, 1, 0, spare.first_uid + offset, BLOCK],
        [SERVER, gid, 1, 0, spare.first_gid + offset, BLOCK],
    )
    if not spare.programs:
        kernel.map_ids(launcher, *("{} {} {}\n{} {} {}".format(*row) for row in maps))
    for program, row in zip(spare.programs, maps, strict=False):
        status = os.spawnv(os.P_WAIT, program, [program, str(launcher), *map(str, row)])
        if status:
            raise OSError(errno.EPERM, f"{program} ended with {status}")


def _serve_as_mapper(line: socket.socket, map_launcher: Callable[[], None], images: str) -> None:
    """Maps ids once, then mounts images for each user namespace received. Ends with the fork server."""
    if not line.recv(16):
        return
    try:
        map_launcher()
        line.send(b"done")
    except OSError as error:
        line.send(str(error).encode())
        return
    while images:
        asked, descriptors, _, _ = socket.recv_fds(line, 16, 1, socket.MSG_CMSG_CLOEXEC)
        if not asked:
            return
        copies: list[int] = []
        try:
            copies.append(kernel.copy_mount(images, descriptors[0]))
        except OSError as error:
            print(f"images cannot be shown as a sandbox's own: {error}", flush=True)
        socket.send_fds(line, [b"images"], copies)
        for descriptor in (*descriptors, *copies):
            os.close(descriptor)
