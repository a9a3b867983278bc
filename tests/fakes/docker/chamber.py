"""A program in namespaces with a directory as its root: what the fakes run instead of a container
or a guest.

    python3 -m tests.fakes.docker.chamber ROOT HOSTNAME PROGRAM ARGUMENT...

Below the directory lie the host's programs, read-only, and a `/dev` and `/proc` of its own. **This is no
sandbox**: it exists so that the program inside can be run for real against an engine that is not there. It
keeps the host's clock, name and files out of reach of what the program does as root, no more.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from etude.sandbox.inside import kernel

_SHOWN = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc/alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_NAMESPACES = (
    kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWUTS | kernel.NEWIPC | kernel.NEWNET
)  # fmt: skip
_ALL_IDS = 65536
PATH = ":".join(
    dict.fromkeys((f"{os.path.realpath(sys.base_prefix)}/bin", "/usr/local/bin", "/usr/bin", "/bin"))
)
"""Where programs are found inside."""


def make_root(root: str) -> None:
    """The directories and files that programs expect; what is there stays."""
    for name in ("dev", "etc", "proc", "tmp", "root", "run", "var/lib"):
        Path(root, name).mkdir(parents=True, exist_ok=True)
    Path(root, "tmp").chmod(0o1777)
    passwd = "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/workspace:/bin/sh\n"
    for name, text in (("passwd", passwd), ("group", "root:x:0:\nagent:x:1000:\n"), ("machine-id", "")):
        path = Path(root, "etc", name)
        if not path.exists():
            path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Runs the program and exits as it does."""
    root, hostname, argv = arguments[0], arguments[1], arguments[2:]
    make_root(root)
    unshare()
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        _enter(root, hostname)
        os.environ.setdefault("PATH", PATH)
        try:
            os.execvp(argv[0], argv)
        except OSError:
            os._exit(127)
    for descriptor in (0, 1):
        os.close(descriptor)
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)


def unshare() -> None:
    """New namespaces. As root all users are mapped, so that the program may change its own; else oneself."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        kernel.unshare(_NAMESPACES)
        kernel.write_maps(0, uid, gid)
        return
    # More than oneself can only be mapped from outside: by a child that stays there.
    reader, writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        os.read(reader, 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{os.getppid()}/{name}").write_text(f"0 0 {_ALL_IDS}", encoding="ascii")
        os._exit(0)
    kernel.unshare(_NAMESPACES)
    os.close(writer)
    os.close(reader)
    if os.waitpid(helper, 0)[1] != 0:
        raise SystemExit("the users of the chamber cannot be mapped")


def _enter(root: str, hostname: str) -> None:
    kernel.raise_loopback()
    socket.sethostname(hostname)
    kernel.mount("", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    kernel.mount(root, root, flags=kernel.MS_BIND | kernel.MS_REC)
    prefix = os.path.realpath(sys.base_prefix).lstrip("/")
    for name in (*_SHOWN, *(() if prefix.startswith("usr/") or prefix == "usr" else (prefix,))):
        _show(name, root)
    for name in _DEVICES:
        target = Path(root, "dev", name)
        target.touch()
        kernel.mount(f"/dev/{name}", str(target), flags=kernel.MS_BIND)
    _link(Path(root, "dev/fd"), "/proc/self/fd")
    kernel.mount("proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    os.chdir(root)
    kernel.pivot_root_here()
    os.chdir("/")


def _show(name: str, root: str) -> None:
    source, target = Path("/", name), Path(root, name)
    if source.is_symlink():
        _link(target, str(source.readlink()))
    elif source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        kernel.mount(str(source), str(target), flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.make_read_only(str(target))


def _link(path: Path, target: str) -> None:
    if not path.is_symlink():
        path.symlink_to(target)


if __name__ == "__main__":
    main(sys.argv[1:])
