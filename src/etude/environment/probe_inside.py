"""Runs inside a sandbox: prints everything visible there by which environments might be distinguished.

`python3 probe_inside.py SECTION` prints one JSON object of texts. Standard library only; short, since tools
show a few thousand characters of output.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time

SHOWN = 160
PROGRAMS = """
python3 pip pytest ruff git rg gcc make cmake node npm go cargo java curl wget ssh vim nano less man sudo
docker apt-get perl ps top ip unzip
"""


def read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:  # noqa: PTH123 - every import costs each probe
            return file.read(1 << 16).strip()
    except OSError as error:
        return "(" + type(error).__name__ + ")"


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return "(" + type(error).__name__ + ")"
    return (done.stdout or done.stderr).strip()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def entries_of(path: str) -> str:
    try:
        return " ".join(sorted(os.listdir(path)))  # noqa: PTH208
    except OSError as error:
        return "(" + type(error).__name__ + ")"


def line_of(path: str, name: str) -> str:
    for line in read(path).splitlines():
        if line.startswith(name):
            return " ".join(line.split()[1:])
    return ""


def identity() -> dict[str, object]:
    return {
        "hostname": socket.gethostname(),
        "etc_hostname": read("/etc/hostname"),
        "uid": f"{os.getuid()}:{os.getgid()} {os.getgroups()}",
        "passwd": digest(read("/etc/passwd")),
        "home": os.path.expanduser("~"),  # noqa: PTH111
        "cwd": os.getcwd(),  # noqa: PTH109
        "umask": str(os.umask(0o022)),
        "terminal": str([os.isatty(fd) for fd in (0, 1, 2)]),
        "machine_id": read("/etc/machine-id"),
        "os_release": line_of("/etc/os-release", "PRETTY_NAME") or digest(read("/etc/os-release")),
    }


def environment() -> dict[str, object]:
    return dict(os.environ)


def clock() -> dict[str, object]:
    return {
        "now": int(time.time()),
        "zone": " ".join(time.tzname),
        "offset_s": time.timezone,
        "locale": output_of("locale")[:SHOWN],
        "uptime": read("/proc/uptime").split(" ")[0],
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "boot_time": line_of("/proc/stat", "btime"),
    }


def git() -> dict[str, object]:
    return {
        "version": output_of("git", "--version"),
        "config": output_of("git", "config", "--list", "--show-origin"),
        "head": output_of("git", "rev-parse", "HEAD"),
        "remotes": output_of("git", "remote", "-v"),
        "log": output_of("git", "log", "--oneline", "-n", "3"),
        "dot_git": str(os.path.exists(".git")),  # noqa: PTH110
    }


def tools() -> dict[str, object]:
    found: dict[str, object] = {name: shutil.which(name) or "-" for name in PROGRAMS.split()}
    for name in ("rg", "node", "gcc"):
        if found[name] != "-":
            found[name + "_version"] = output_of(name, "--version").split("\n")[0]
    return found


def python() -> dict[str, object]:
    from importlib import metadata

    packages = sorted({f"{one.metadata['Name']} {one.version}" for one in metadata.distributions()})
    return {
        "version": sys.version,
        "executable": sys.executable,
        "path": " ".join(sys.path[1:]),
        "num_packages": len(packages),
        "packages": digest(" ".join(packages)),
        "some_packages": " ".join(packages),
    }


def machine() -> dict[str, object]:
    import resource

    names = ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE", "STACK")
    disk = os.statvfs(".")
    return {
        "cpus": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "model": line_of("/proc/cpuinfo", "model name"),
        "memory": line_of("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "version": digest(read("/proc/version")),
        "disk_bytes": disk.f_frsize * disk.f_blocks,
        "disk_inodes": disk.f_files,
        "load": read("/proc/loadavg"),
        **{
            "limit_" + name.lower(): resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names
        },
    }


def proc() -> dict[str, object]:
    mounts = [line.split()[:3] for line in read("/proc/self/mounts").splitlines()]
    status = {
        "status_" + name.lower(): line_of("/proc/self/status", name + ":")
        for name in ("NoNewPrivs", "Seccomp", "CapEff", "NSpid")
    }
    return {
        "init": read("/proc/1/cmdline").replace("\0", " "),
        "num_processes": sum(name.isdigit() for name in entries_of("/proc").split()),
        "parent": read(f"/proc/{os.getppid()}/cmdline").replace("\0", " ").split(" ")[0],
        "cgroup": read("/proc/self/cgroup"),
        "mounts": " ".join(sorted(f"{m[1]}:{m[2]}" for m in mounts if not m[1].startswith("/proc/"))),
        "mount_sources": digest(" ".join(sorted(m[0] for m in mounts))),
        "markers": " ".join(p for p in ("/.dockerenv", "/run/.containerenv") if os.path.exists(p)),  # noqa: PTH110
        "cmdline": digest(read("/proc/cmdline")),
        "dmesg": digest(output_of("dmesg"))[:16],
        **status,
    }


def network() -> dict[str, object]:
    return {
        "interfaces": " ".join(line.split(":")[0].strip() for line in read("/proc/net/dev").splitlines()[2:]),
        "routes": len(read("/proc/net/route").splitlines()),
        "resolv": read("/etc/resolv.conf"),
        "hosts": read("/etc/hosts"),
    }


def paths() -> dict[str, object]:
    return {
        "root": entries_of("/"),
        "tmp": entries_of("/tmp"),
        "home": entries_of(os.path.expanduser("~")),  # noqa: PTH111
        "workspace": entries_of("."),
        "opt": entries_of("/opt"),
        "mnt": entries_of("/mnt"),
        "etc": digest(entries_of("/etc")),
        "workspace_status": f"{os.stat('.').st_mode:o} {os.stat('.').st_uid}",  # noqa: PTH116
    }


def moment() -> dict[str, object]:
    return {"ns": time.time_ns()}


SECTIONS = {
    one.__name__: one
    for one in (identity, environment, clock, git, tools, python, machine, proc, network, paths, moment)
}

if __name__ == "__main__":
    shown = {key: str(value)[:SHOWN] for key, value in SECTIONS[sys.argv[1]]().items()}
    print(json.dumps(shown))
