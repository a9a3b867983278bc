"""The bundle of a container: its configuration in OCI's format, and the root file system shared by all.

Inside, the server is root without most capabilities, and every command of the agent runs as user 1000 without
any: it cannot signal or inspect the server, nor change the copy of the template that is the base of diffs.
The host's programs are read-only; writable directories are in memory, with a size limit.
"""

from __future__ import annotations

import compileall
import io
import os
import py_compile
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.sandbox.guest_program import guest_arguments, guest_program
from etude.sandbox.gvisor.runsc import PREFIX, ROOTFS
from etude.sandbox.inside.namespaces import ETC, ETC_DIRECTORIES, HOST_DIRECTORIES, SANDBOX_UID
from etude.sandbox.types import Resources

SHARED_MEMORY_BYTES = 16 << 20
PROGRAM, BASE = "/opt/etude", "/var/lib/etude/base"
_CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
)
"""Capabilities of the server, in gVisor's kernel only. SYS_ADMIN: to set the hostname of a copy."""
_SERVER_FILES = 1024
"""Descriptors of the server beyond the limit of each command."""
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
_MOUNT_POINTS = ("proc", "dev", "tmp", "workspace", "etc", BASE.lstrip("/"))


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs the server inside; it is available to commands as well."""

    program: str
    prefix: str
    """Directory of its installation."""

    @classmethod
    def of_this_process(cls) -> Interpreter:
        """The interpreter of this process, without its virtual environment."""
        return cls(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))

    @property
    def is_outside_usr(self) -> bool:
        """Whether it is outside of `/usr`, so that it needs a mount of its own."""
        return not f"{self.prefix}/".startswith("/usr/")

    @property
    def path(self) -> str:
        """PATH of commands."""
        return ":".join(dict.fromkeys((f"{self.prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin")))


def configuration(interpreter: Interpreter, resources: Resources, hostname: str) -> dict[str, Any]:
    """`config.json` of one container."""
    arguments = guest_arguments(resources, line="stdio", uid=SANDBOX_UID, base=BASE, path=interpreter.path)
    return {
        "ociVersion": "1.0.2",
        "hostname": hostname,
        "root": {"path": ROOTFS, "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": [interpreter.program, "-I", "-S", "-B", PROGRAM, *arguments, "--filter"],
            "env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8", "PYTHONHASHSEED=0"],
            "capabilities": {kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
            "noNewPrivileges": True,
            "rlimits": _limits(resources),
        },
        "mounts": _mounts(interpreter, resources),
        "linux": {"namespaces": [{"type": kind} for kind in _NAMESPACES]},
    }


def _limits(resources: Resources) -> list[dict[str, object]]:
    rows = (
        ("RLIMIT_NPROC", resources.num_processes),
        ("RLIMIT_NOFILE", resources.open_files + _SERVER_FILES),
        ("RLIMIT_FSIZE", resources.file_bytes),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 0),
    )
    return [{"type": kind, "soft": limit, "hard": limit} for kind, limit in rows]


def _mounts(interpreter: Interpreter, resources: Resources) -> list[dict[str, object]]:
    shared_bytes = min(SHARED_MEMORY_BYTES, resources.disk_bytes)
    mounts: list[dict[str, object]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "dev", "options": ["nosuid", "mode=755"]},
        _tmpfs("/dev/shm", "1777", shared_bytes),
        _tmpfs("/tmp", "1777", resources.disk_bytes),
        _tmpfs("/workspace", "755", resources.disk_bytes),
    ]
    folders = [Path("/", name) for name in (*HOST_DIRECTORIES, *ETC_DIRECTORIES)]
    mounts += [_bind(str(path), str(path)) for path in folders if path.is_dir() and not path.is_symlink()]
    if interpreter.is_outside_usr:
        mounts.append(_bind(interpreter.prefix, PREFIX))
    return mounts


def _tmpfs(path: str, mode: str, size_bytes: int) -> dict[str, object]:
    options = ["nosuid", "nodev", f"mode={mode}", f"size={size_bytes}"]
    return {"destination": path, "type": "tmpfs", "source": "memory", "options": options}


def _bind(path: str, source: str) -> dict[str, object]:
    options = ["rbind", "ro", "nosuid", "nodev"]
    return {"destination": path, "type": "bind", "source": source, "options": options}


def build_rootfs(root: Path, interpreter: Interpreter) -> None:
    """Creates the lowest layer of every container's root: mount points, `/etc` and the program inside."""
    root.mkdir(mode=0o755)
    for name in _MOUNT_POINTS:
        (root / name).mkdir(parents=True)
    for name in HOST_DIRECTORIES:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(source.readlink())
        elif source.is_dir():
            (root / name).mkdir()
    if interpreter.is_outside_usr:
        (root / interpreter.prefix.lstrip("/")).mkdir(parents=True)
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text, encoding="utf-8")
    for name in ETC_DIRECTORIES:
        (root / name).mkdir(parents=True)
    cache = Path("/etc/ld.so.cache")
    if cache.is_file():
        shutil.copyfile(cache, root / "etc/ld.so.cache")
    _install_program(root / PROGRAM.lstrip("/"))
    for folder, _, names in os.walk(root):
        Path(folder).chmod(0o755)
        for name in names:
            if not (path := Path(folder, name)).is_symlink():
                path.chmod(0o644)


def _install_program(directory: Path) -> None:
    """Installs the program unpacked and compiled: it starts more than twice as fast as from a zip."""
    with zipfile.ZipFile(io.BytesIO(guest_program())) as archive:
        archive.extractall(directory)
    compileall.compile_dir(
        directory,
        quiet=2,
        stripdir=directory,
        prependdir=PROGRAM,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
