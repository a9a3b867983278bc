"""The program inside a guest: a server on a virtio-serial port or standard input and output.

    python3 -I -S guest.pyz --line stdio|PATH --workspace DIR --base DIR [--uid N] ...

A guest outlives its owner's connection: it is copied, paused and moved. Before that the owner sends `hold`,
and the host that resumes it `hello`, with the time, fresh entropy and a name: two copies of a guest must not
continue with the same clock, random numbers and identity.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import os
import random
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from etude.sandbox.inside import kernel
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.gathering import ChangeCollector, IndexedRoot
from etude.sandbox.inside.jobs import WARM_MODULES
from etude.sandbox.inside.processes import NamespaceProcesses, UserProcesses
from etude.sandbox.inside.running import Settings
from etude.sandbox.inside.seccomp import build_filter
from etude.sandbox.inside.server import FILE_OPERATION_WALL_S, Answer, Server
from etude.sandbox.inside.watches import MemoryFloor, ProcessorWatch, keep_in_memory

_libc = ctypes.CDLL(None)
_acting: int | None = None
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207
_XATTRS = {"x86_64": (188, 199), "aarch64": (5, 16)}
"""First and last number of the extended-attribute calls, `setxattr` and its like."""


class TemplateInstaller:
    """Installs a template's files twice: as the base of diffs, and as the workspace."""

    def __init__(self, workspace: str, base: str, uid: int | None, root: IndexedRoot) -> None:
        self._workspace = workspace
        self._root = root
        self._base = base
        self._uid = uid
        for directory in (workspace, base):
            os.makedirs(directory, exist_ok=True)
        os.chmod(base, 0o755)
        if uid is not None:
            os.chown(workspace, uid, uid)

    def install(self, header: Header, payload: bytes) -> Answer:
        """Replaces base and workspace by the given files. With `more` adds the files to both; with `keep` to
        the image's own files in the workspace, which become the base."""
        with as_root():
            return self._install(header, payload)

    def _install(self, header: Header, payload: bytes) -> Answer:
        if header.get("keep"):
            self._root.make()
            shutil.copytree(self._workspace, self._base, symlinks=True, dirs_exist_ok=True)
        for directory in () if header.get("more") or header.get("keep") else (self._workspace, self._base):
            for entry in os.scandir(directory):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        start = 0
        for path, size in header["files"]:
            data = payload[start : start + size]
            start += size
            self._write(self._base, path, data, None)
            self._write(self._workspace, path, data, self._uid)
        return {}, b""

    def _write(self, root: str, path: str, data: bytes, uid: int | None) -> None:
        folder = root
        for part in path.split("/")[:-1]:
            folder = os.path.join(folder, part)
            try:
                os.mkdir(folder)
            except FileExistsError:
                continue
            if uid is not None:
                os.chown(folder, uid, uid)
        full = os.path.join(root, path)
        with open(full, "wb") as file:
            file.write(data)
        if uid is not None:
            os.chown(full, uid, uid)


class ChildWatch:
    """Replaces `pidfd_open`, which gVisor lacks, for children: a pipe that closes when the child ends."""

    def __init__(self) -> None:
        self._writers: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, lambda number, frame: self._close_ended())

    def open(self, pid: int, flags: int = 0) -> int:
        """A descriptor that becomes readable once the child has ended."""
        reader, writer = os.pipe()
        self._writers[pid] = writer
        self._close_ended()
        return reader

    def _close_ended(self) -> None:
        for pid in list(self._writers):
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:
                # The server has reaped it already.
                ended = True
            # The signal may interrupt this loop itself: the call that removes a writer closes it.
            writer = self._writers.pop(pid, None) if ended else None
            if writer is not None:
                os.close(writer)


def has_pidfds() -> bool:
    """Whether this kernel has `pidfd_open`."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return False
    return True


def filters() -> tuple[bytes, bytes]:
    """The sandbox's system-call filter, and one that disables extended attributes.

    In gVisor these calls fail with EBADF on symbolic links of the host, which breaks `ls -l`.
    """
    first, last = _XATTRS[kernel.MACHINE]
    program = (
        (0x20, 0, 0, 0),  # load the number
        (0x35, 0, 2, first),  # at least the first?
        (0x25, 1, 0, last),  # beyond the last?
        (0x06, 0, 0, 0x00050000 | errno.EOPNOTSUPP),
        (0x06, 0, 0, 0x7FFF0000),  # allowed
    )
    return build_filter(kernel.MACHINE), b"".join(struct.pack("HBBI", *row) for row in program)


def act_as(uid: int) -> None:
    """Makes this process open and create files with the rights and ownership of `uid`.

    The server works on the agent's files as the agent: links cannot lead it to files that the agent may not
    access, and the agent may change what the server wrote. For a server that stays root.
    """
    global _acting
    _acting = uid
    _libc.setfsgid(ctypes.c_int(uid))
    _libc.setfsuid(ctypes.c_int(uid))
    if _libc.setfsuid(ctypes.c_int(-1)) == uid:
        return
    # gVisor has no fsuid. With the effective ids the agent cannot signal or trace the server either.
    if uid == os.getuid():
        os.seteuid(uid)
        os.setegid(uid)
    else:
        os.setegid(uid)
        os.seteuid(uid)


@contextmanager
def as_root() -> Iterator[None]:
    """A context in which files are opened with the rights of the server's own user."""
    acting = _acting
    if acting is None:
        yield
        return
    act_as(os.getuid())
    try:
        yield
    finally:
        act_as(acting)


def greet(header: Header) -> None:
    """Sets time, entropy and identity of a copied or restored guest, as far as it has the rights."""
    random.seed(header["entropy"])
    if os.getuid() != 0:
        return
    with as_root():
        _set_identity(header)


def _set_identity(header: Header) -> None:
    _try_to_set(lambda: time.clock_settime(time.CLOCK_REALTIME, header["time_s"]))
    _try_to_set(lambda: _add_entropy(bytes.fromhex(header["entropy"])))
    _try_to_set(lambda: socket.sethostname(header["hostname"]))
    _try_to_set(lambda: _write_text("/etc/machine-id", header["machine_id"] + "\n"))


def _try_to_set(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        # gVisor takes clock and entropy from the host, and cannot set them.
        print(f"not set after the restore: {error}", file=sys.stderr, flush=True)


def _add_entropy(entropy: bytes) -> None:
    with open("/dev/urandom", "wb", buffering=0) as pool:
        fcntl.ioctl(pool, _ADD_ENTROPY, struct.pack("ii", 8 * len(entropy), len(entropy)) + entropy)
        fcntl.ioctl(pool, _RESEED)


def _write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def open_line(name: str) -> tuple[int, int]:
    """(reader, writer) descriptors of the line to the owner. Raises OSError."""
    if name == "stdio":
        reader, writer = os.dup(0), os.dup(1)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        return reader, writer
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    return descriptor, descriptor


def _close_log() -> None:
    """Stops logging: under gVisor an agent may open the server's descriptors through /proc, and could fill
    the owner's memory through the log.
    """
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def main(arguments: list[str]) -> None:
    """Serves until the line ends (standard input), or forever (a port)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--line", required=True)
    parser.add_argument("--workspace", default="/workspace")
    parser.add_argument("--base", default="/var/lib/etude/base")
    parser.add_argument("--uid", type=int)
    parser.add_argument("--memory-bytes", type=int, default=1 << 40)
    parser.add_argument("--cpu-s", type=int, default=1 << 30)
    parser.add_argument("--open-files", type=int, default=1024, help="of each process")
    parser.add_argument("--floor-bytes", type=int, default=0, help="end the agent's processes below this")
    parser.add_argument("--path", default="/usr/local/bin:/usr/bin:/bin")
    parser.add_argument("--filter", action="store_true", help="filter the system calls of commands")
    options = parser.parse_args(arguments)
    for name in WARM_MODULES:
        __import__(name)
    root = IndexedRoot()
    installer = TemplateInstaller(options.workspace, options.base, options.uid, root)
    workspace = Workspace(options.workspace, os.open(options.base, os.O_RDONLY | os.O_DIRECTORY))
    is_init = os.getpid() == 1
    processes = UserProcesses(options.uid) if options.uid is not None else NamespaceProcesses()
    assert is_init or options.uid is not None, "without a user of their own, commands need a pid namespace"
    has_own_kernel = options.line != "stdio"
    settings = Settings(
        options.memory_bytes,
        options.cpu_s,
        options.path,
        uid=options.uid,
        open_files=options.open_files,
        watch_memory=False,
        # A guest kernel charges time in which the host runs other work to the guest's processes.
        file_operation_s=FILE_OPERATION_WALL_S if has_own_kernel else Settings.file_operation_s,
    )
    for program in filters() if options.filter else ():
        os.register_at_fork(after_in_child=partial(kernel.install_filter, program))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if not has_pidfds():
        os.pidfd_open = ChildWatch().open
    reader, writer = open_line(options.line)

    def end_processes(header: Header, payload: bytes) -> Answer:
        """Kills the agent's processes: the owner has seen that memory is used up."""
        processes.kill_all()
        return {}, b""

    if options.uid is not None:
        # A child becomes the agent permanently, which needs root's rights.
        os.register_at_fork(after_in_child=lambda: act_as(os.getuid()))
        act_as(options.uid)
    extra = {"install": installer.install, "exhausted": end_processes}
    watches: list[ProcessorWatch | MemoryFloor] = [ProcessorWatch(processes, options.cpu_s)]
    if options.floor_bytes:
        watches.append(MemoryFloor(processes, options.floor_bytes))
        keep_in_memory()
    server = Server(
        reader,
        writer,
        workspace,
        processes,
        settings,
        greet=greet,
        extra=extra,
        collector=ChangeCollector(options.workspace, root if is_init else None),
        watches=watches,
    )
    if not has_own_kernel:
        _close_log()
    server.serve(returning=has_own_kernel)


if __name__ == "__main__":
    main(sys.argv[1:])
