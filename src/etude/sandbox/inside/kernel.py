"""Linux system calls that Python lacks, by ctypes. Every call raises OSError with its name."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import stat
import struct

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
SIGCHLD = 17

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS = 1, 4, 24, 28
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 38, 22, 36
_SECCOMP_MODE_FILTER = 2
_SECUREBITS = 0b1110_1111
"""NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, each locked; KEEP_CAPS locked off."""
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_IDMAP = 1, 2, 1 << 20
_OPEN_TREE_CLONE, _MOVE_MOUNT_FROM_DESCRIPTOR, _AT_EMPTY_PATH = 1, 4, 0x1000
_SIOCSIFFLAGS = 0x8914
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 2, 8

_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91},
}
_SHARED_NUMBERS = {"open_tree": 428, "move_mount": 429, "openat2": 437, "mount_setattr": 442}
"""Numbers of calls that are the same on every machine."""
MACHINE = platform.machine()
MACHINES = tuple(_NUMBERS)

# PyDLL keeps the interpreter lock: a raw clone must not return to an interpreter that has released it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(name: str, *arguments: object) -> int:
    number = _SHARED_NUMBERS.get(name) or _NUMBERS[MACHINE][name]
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), name)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def clone(flags: int) -> int:
    """fork(2) into new namespaces in one step: 0 in the child, its pid in the parent.

    Avoids the second fork that unshare needs for a pid namespace. For single-threaded processes only.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    zero = ctypes.c_long(0)
    pid = _libc.syscall(
        ctypes.c_long(_NUMBERS[MACHINE]["clone"]), ctypes.c_long(flags | SIGCHLD), zero, zero, zero, zero
    )
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(pid, "clone")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {kind or 'bind'} at {target}")


def detach(target: str) -> None:
    """umount2(2) with MNT_DETACH."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root_here() -> None:
    """Makes the current directory, a mount point, the root, and unmounts the old root."""
    _syscall("pivot_root", b".", b".")
    detach(".")
    os.chdir("/")


def make_read_only(target: str) -> None:
    """Makes a mount and all mounts below it read-only and without set-user-id programs."""
    _set_attributes(_AT_FDCWD, target, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)


def copy_mount(path: str, namespace: int, read_only: bool = True) -> int:
    """A descriptor of a copy of the mount at `path`, not yet mounted anywhere.

    The owners of files are translated by the id map of a user namespace (a descriptor). Raises OSError,
    EINVAL where the file system or the kernel has no idmapped mounts.
    """
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    copy = _syscall("open_tree", ctypes.c_int(_AT_FDCWD), path.encode(), flags)
    try:
        attributes = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_IDMAP | (_MOUNT_ATTR_RDONLY if read_only else 0)
        _set_attributes(copy, "", _AT_EMPTY_PATH, attributes, namespace)
    except OSError:
        os.close(copy)
        raise
    return copy


def move_mount(copy: int, target: str) -> None:
    """Attaches a mount from `copy_mount`, and closes the descriptor."""
    flags = ctypes.c_uint(_MOVE_MOUNT_FROM_DESCRIPTOR)
    _syscall("move_mount", ctypes.c_int(copy), b"", ctypes.c_int(_AT_FDCWD), target.encode(), flags)
    os.close(copy)


def _set_attributes(directory: int, path: str, flags: int, attributes: int, namespace: int = 0) -> None:
    packed = struct.pack("QQQQ", attributes, 0, 0, namespace)
    where = (ctypes.c_int(directory), path.encode(), ctypes.c_uint(flags))
    _syscall("mount_setattr", *where, packed, ctypes.c_size_t(len(packed)))


def _prctl(what: str, option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in arguments] + [ctypes.c_ulong(0)] * (4 - len(arguments))
    _check(_libc.prctl(ctypes.c_int(option), *values), what)


def set_dumpable(dumpable: bool) -> None:
    """Sets whether processes of the same user may inspect this one through /proc or ptrace."""
    _prctl("set dumpable", _PR_SET_DUMPABLE, int(dumpable))


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process (PR_SET_CHILD_SUBREAPER)."""
    _prctl("set child subreaper", _PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Drops all capabilities permanently, for this process and its future children."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    _prctl("set securebits", _PR_SET_SECUREBITS, _SECUREBITS)
    _syscall("capset", struct.pack("II", 0x20080522, 0), bytes(24))
    no_new_privileges()


def no_new_privileges() -> None:
    """Keeps exec from gaining privileges (PR_SET_NO_NEW_PRIVS)."""
    _prctl("set no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Installs a seccomp BPF program (packed `struct sock_filter`s) on this process and its children."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(header, len(header))
    _prctl("install seccomp filter", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(pointer))


def write_maps(inside_id: int, uid: int, gid: int) -> None:
    """Maps one user and one group into the new user namespace of this process."""
    write_file("/proc/self/setgroups", "deny")
    map_ids("self", f"{inside_id} {uid} 1", f"{inside_id} {gid} 1")


def map_ids(process: int | str, uids: str, gids: str) -> None:
    """Writes the id maps of a process's new user namespace: lines of first id inside, first outside, number.
    For another process, or more than the own id, it needs rights over those ids outside."""
    write_file(f"/proc/{process}/uid_map", uids)
    write_file(f"/proc/{process}/gid_map", gids)


def write_file(path: str | os.PathLike[str], text: str) -> None:
    """Writes to a file of the kernel, unbuffered: with a buffer, errors come only at its close."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends (PR_SET_PDEATHSIG)."""
    _prctl("set parent death signal", _PR_SET_PDEATHSIG, 9)


def pivot_into(new_root: str, old_root: str) -> None:
    """pivot_root(2): `new_root` becomes the root, and the old one is mounted at `old_root` below it."""
    _syscall("pivot_root", new_root.encode(), old_root.encode())
    os.chdir("/")


def raise_loopback() -> None:
    """Brings up the interface `lo` of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anchor:
        fcntl.ioctl(anchor, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", 1))


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2(2) that never leaves `directory`, even if links are created concurrently: EXDEV then.

    Where the kernel has no such call (gVisor), every link in the path is EXDEV: resolve the path first.
    """
    how = struct.pack("QQQ", flags, mode, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    size = ctypes.c_size_t(len(how))
    try:
        return _syscall("openat2", ctypes.c_int(directory), path.encode(errors="surrogateescape"), how, size)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    return open_without_links(directory, path, flags, mode)


def open_without_links(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens `path` (normalised) component by component. Raises OSError, EXDEV for a link or `..`."""
    folder = directory
    *above, last = path.split("/")
    try:
        for name in above:
            inner = _open_name(folder, name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            if folder != directory:
                os.close(folder)
            folder = inner
        return _open_name(folder, last, flags, mode)
    finally:
        if folder != directory:
            os.close(folder)


def _open_name(folder: int, name: str, flags: int, mode: int = 0) -> int:
    if name == "..":
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    try:
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            raise
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name) from error
