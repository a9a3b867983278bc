"""Takes single protections out of a fork server, for controls. Runs in the fork server's own process.

Standard library and `etude.sandbox.inside` only. A weakening is a name:

    allow <call>          the filter lets this call through, whatever its arguments
    limit <NAME>          RLIMIT_<NAME> is all that the host allows
    show <directory>      a host directory appears in the root of sandboxes, writable
    <one of WEAKENINGS>   what its function says
"""

# ruff: noqa: PTH101, PTH103, PTH118, PTH123 -- stands in for code that handles files by `os` calls
from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import struct
import tarfile
from collections.abc import Callable
from typing import IO, Any

from etude.sandbox.inside import (
    filesystem,
    ids,
    isolation,
    jobs,
    kernel,
    layers,
    namespaces,
    packing,
    running,
    seccomp,
    server,
    zygote,
)
from etude.sandbox.inside.rights import NOBODY
from tests.adversary.escape.calls import NUMBERS

_ALLOWED = (0x06, 0, 0, 0x7FFF0000)
_AMBIENT, _AMBIENT_RAISE = 47, 2


def main(arguments: list[str], weakenings: list[str]) -> None:
    """Serves as `zygote.main` does, without the named protections."""
    for name in weakenings:
        weaken(name)
    namespaces._FILTERS = {key: seccomp.build_filter(kernel.MACHINE, *key) for key in namespaces._FILTERS}
    zygote.main(arguments)


def weaken(name: str) -> None:
    """Takes one protection away. Raises KeyError for an unknown one."""
    word, _, rest = name.partition(" ")
    if word == "allow":
        _allow(NUMBERS[kernel.MACHINE][rest])
    elif word == "limit":
        _ignore_limit(getattr(resource, f"RLIMIT_{rest}"))
    elif word == "show":
        _show(rest)
    else:
        WEAKENINGS[name]()


def _wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a function by `wrapper(original, ...)`."""
    original = getattr(module, name)
    setattr(module, name, lambda *arguments, **named: wrapper(original, *arguments, **named))


def _allow(number: int) -> None:
    def blocks(original: Callable[..., Any], *arguments: Any) -> list[tuple[int, Any]]:
        firsts = original(*arguments)
        last = max(firsts[-1][0], number + 1)
        bodies: list[Any] = []
        for (first, body), end in zip(firsts, [row[0] for row in firsts[1:]] + [last + 1], strict=True):
            bodies += [body] * (end - first)
        bodies[number] = [_ALLOWED]
        return [(n, body) for n, body in enumerate(bodies) if n == 0 or bodies[n - 1] != body]

    _wrap(seccomp, "_blocks", blocks)


def _ignore_limit(kind: int) -> None:
    def setrlimit(original: Callable[..., Any], which: int, limits: tuple[int, int]) -> None:
        most = resource.getrlimit(which)[1]
        original(which, (most, most) if which == kind else limits)

    def in_shell(original: Callable[..., str], limits: jobs.ChildLimits) -> str:
        letter = {resource.RLIMIT_NOFILE: "n", resource.RLIMIT_CPU: "t"}.get(kind)
        kept = [part for part in original(limits).split("; ") if part and f" -{letter} " not in part]
        return "".join(f"{part}; " for part in kept)

    _wrap(resource, "setrlimit", setrlimit)
    _wrap(jobs.ChildLimits, "in_shell", in_shell)


def _show(directory: str) -> None:
    def make_read_only(original: Callable[..., Any], target: str) -> None:
        if target != "/root":
            original(target)
            return
        os.makedirs(f"/root{directory}", exist_ok=True)
        original(target)
        kernel.mount(f"/host{directory}", f"/root{directory}", flags=kernel.MS_BIND | kernel.MS_REC)

    _wrap(kernel, "make_read_only", make_read_only)
    if directory == "/dev/shm":
        _skip_mount(lambda target, kind: target.endswith("/dev/shm"))


def _skip_mount(matches: Callable[[str, str], bool]) -> None:
    def mount(original: Callable[..., Any], source: str, target: str, kind: str = "", *rest: Any,
              **named: Any) -> None:  # fmt: skip
        if not (source == "/scratch/shm" and matches(target, kind)):
            original(source, target, kind, *rest, **named)

    _wrap(kernel, "mount", mount)


def _strip(name: str, flags: int) -> None:
    _wrap(kernel, name, lambda original, wanted: original(wanted & ~flags))


def _no_user_namespace() -> None:
    """The sandbox's processes are the host's root, without capabilities."""
    assert os.geteuid() == 0, "only root can make namespaces without a user namespace"
    namespaces.WATCHES.clear()  # they would be the host's own
    _strip("clone", kernel.NEWUSER)
    _strip("unshare", kernel.NEWUSER)
    for name in ("setgroups", "setresgid", "setresuid"):
        setattr(os, name, lambda *ids: None)
    kernel.write_maps = kernel.map_ids = lambda *ids: None
    _wrap(ids, "reserve_ids", lambda original, words, images: original([], images))


def _no_user_namespace_as_nobody() -> None:
    """The same as a user of the host, whose processes the host counts together: no limit on their number."""
    _ignore_limit(resource.RLIMIT_NPROC)
    setresuid, setresgid, setgroups = os.setresuid, os.setresgid, os.setgroups
    _no_user_namespace()

    def capset(original: Callable[..., Any], name: str, *arguments: Any) -> Any:
        if name == "capset":
            setgroups([])
            setresgid(NOBODY, NOBODY, NOBODY)
            setresuid(NOBODY, NOBODY, NOBODY)
        return original(name, *arguments)

    _wrap(kernel, "_syscall", capset)
    _wrap(namespaces, "enter_sandbox", _open_workspace)


def _open_workspace(original: Callable[..., Any], *arguments: Any) -> Any:
    """Root made the workspace's file system: the user that root becomes may write to it all the same."""
    entered = original(*arguments)
    os.chmod(".", 0o777)
    return entered


def _keep_capabilities() -> None:
    """Every capability stays, through exec too, and over the sandbox's namespaces: it moves into no other."""

    def unshare(original: Callable[..., Any], flags: int) -> None:
        if flags != kernel.NEWUSER:
            original(flags)
            return
        kernel.write_maps = lambda *ids: None

    _wrap(kernel, "unshare", unshare)

    def drop() -> None:
        with open("/proc/self/status") as file:
            held = int(next(line for line in file if line.startswith("CapPrm")).split()[1], 16)
        low, high = held & 0xFFFFFFFF, held >> 32
        data = struct.pack("IIIIII", low, low, low, high, high, high)
        kernel._syscall("capset", struct.pack("II", 0x20080522, 0), data)
        for capability in range(64):
            if held >> capability & 1:
                kernel._prctl("raise ambient", _AMBIENT, _AMBIENT_RAISE, capability)
        kernel.no_new_privileges()

    kernel.drop_capabilities = drop


def _no_pid_namespace() -> None:
    """Sandboxes share the fork server's process ids."""
    _strip("clone", kernel.NEWPID)

    def mount(original: Callable[..., Any], source: str, target: str, kind: str = "", *rest: Any,
              **named: Any) -> None:  # fmt: skip
        if kind == "proc" and target != "/proc":
            original("/proc", target, flags=kernel.MS_BIND | kernel.MS_REC)
        else:
            original(source, target, kind, *rest, **named)

    _wrap(kernel, "mount", mount)


def _no_outer_pid_namespace() -> None:
    """The fork server shares the host's process ids, and keeps the host's /proc."""
    _strip("unshare", kernel.NEWPID)

    def mount(original: Callable[..., Any], source: str, target: str, kind: str = "", *rest: Any,
              **named: Any) -> None:  # fmt: skip
        if not (kind == "proc" and target == "/proc"):
            original(source, target, kind, *rest, **named)

    _wrap(kernel, "mount", mount)


def _no_network_namespace() -> None:
    _strip("clone", kernel.NEWNET)
    kernel.raise_loopback = lambda: None
    isolation.limit_buffers = lambda: None  # they would be the host's own


def _no_uts_namespace() -> None:
    _strip("clone", kernel.NEWUTS)
    socket.sethostname = lambda name: None


def _chroot_for_pivot() -> None:
    """The old root stays mounted below."""

    def chroot() -> None:
        os.chroot(".")
        os.chdir("/")

    kernel.pivot_root_here = chroot


def _tmpfs_option(pattern: str, replacement: str) -> Callable[[], None]:
    def mount(original: Callable[..., Any], source: str, target: str, kind: str = "", flags: int = 0,
              data: str = "") -> None:  # fmt: skip
        if target == "/scratch":
            data = re.sub(pattern, replacement, data)
        original(source, target, kind, flags, data)

    return lambda: _wrap(kernel, "mount", mount)


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _work_on_the_template(original: Callable[..., Any], target: str, lowers: list[str], *rest: str) -> None:
    """The workspace is the template's own directory, writable."""
    if target.endswith("/workspace"):
        writable = lowers[-1].replace(namespaces.FILES_RO, namespaces.FILES, 1)
        kernel.mount(writable, target, flags=kernel.MS_BIND)
    else:
        original(target, lowers, *rest)


def _open_anywhere(directory: int, path: str, flags: int, mode: int = 0) -> int:
    return os.open(path, flags, mode, dir_fd=directory)


def _copy_holes_too(reader: int, writer: int, size: int) -> None:
    while size > 0 and (sent := os.sendfile(writer, reader, None, size)):
        size -= sent


def _remove_by_recursion(path: str) -> None:
    """And what goes wrong in it ends the fork server, not that sandbox alone."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        os._exit(1)


def _keep_all_output(output: jobs.Output) -> None:
    output.truncated = False


def _no_new_privileges_off() -> None:
    """exec may gain privileges; the filter is then installed with the rights that pid 1 still has."""
    install, drop = kernel.install_filter, kernel.drop_capabilities
    kernel.no_new_privileges = lambda: None
    kernel.drop_capabilities = lambda: None

    def install_then_drop(program: bytes) -> None:
        install(program)
        drop()

    kernel.install_filter = install_then_drop


WEAKENINGS: dict[str, Callable[[], None]] = {
    "user namespace": _no_user_namespace,
    "user namespace, as nobody": _no_user_namespace_as_nobody,
    "capabilities dropped": _keep_capabilities,
    "no_new_privs": _no_new_privileges_off,
    "pid namespace": _no_pid_namespace,
    "outer pid namespace": _no_outer_pid_namespace,
    "network namespace": _no_network_namespace,
    "ipc namespace": lambda: _strip("clone", kernel.NEWIPC),
    "uts namespace": _no_uts_namespace,
    "cgroup namespace": lambda: _strip("unshare", kernel.NEWCGROUP),
    "pivot_root": _chroot_for_pivot,
    "read-only root": _set(kernel, "_MOUNT_ATTR_RDONLY", 0),
    "nosuid": _set(kernel, "_MOUNT_ATTR_NOSUID", 0),
    "nodev": _set(namespaces, "MS_NODEV", 0),
    "tmpfs size": _tmpfs_option(r"size=\d+", "size=1g"),
    "tmpfs inodes": _tmpfs_option(r"nr_inodes=\d+", "nr_inodes=1000000"),
    "pid 1 not dumpable": lambda: _wrap(kernel, "set_dumpable", lambda original, wanted: original(True)),
    "memory watchdog": _set(running.JobRunner, "_watch_memory", lambda running: None),
    "descriptors closed": _set(os, "closerange", lambda first, last: None),
    "links resolved": _set(
        filesystem.Workspace, "_resolve", lambda self, path: os.path.join(self.root, path)
    ),
    "opened beneath the workspace": _set(kernel, "open_beneath", _open_anywhere),
    "overlay over the template": lambda: _wrap(namespaces, "_overlay", _work_on_the_template),
    "holes kept": _set(layers, "_copy_data", _copy_holes_too),
    "removal without recursion": _set(layers, "remove_tree", _remove_by_recursion),
    "blocks of 4096 ids": _set(ids, "BLOCK", 8),
    "user of its own": lambda: _wrap(
        ids, "reserve_ids", lambda original, words, images: original([], images)
    ),
    "counts of watches": namespaces.WATCHES.clear,
    "descriptors of the server's own": _set(namespaces, "SERVER_FILES", 256),
    "alarms checked": lambda: setattr(server, "_is_time_over", lambda: server._deadlines_s != server._NEVER),
    "own view of programs": _set(namespaces, "_cover_programs", lambda root, names: None),
    "templates stored apart": lambda: setattr(zygote, "store_in_child", zygote.store_template),
    "output bounded": _set(jobs.Output, "trim", _keep_all_output),
    "filter's machine check": lambda: _wrap(
        seccomp, "build_filter", lambda original, *a, **k: _without_machine_check(original(*a, **k))
    ),
    "layers unpacked by our own code": lambda: setattr(packing, "unpack_tree", _extract_all),
}


def _without_machine_check(program: bytes) -> bytes:
    """The first comparison of a filter always holds."""
    size = struct.calcsize("HBBI")
    return program[:size] + struct.pack("HBBI", 0x05, 0, 0, 1) + program[2 * size :]


def _extract_all(file: IO[bytes], root: str) -> None:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extraction_filter = lambda member, path: member
        archive.extractall(root)
