"""Describes the machine of a run: enough to judge its figures, without names of hosts, people or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from etude.kit.git import run_git

LIBRARIES = (
    "etude",
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "pyarrow",
    "pydantic",
    "safetensors",
    "zstandard",
    "xxhash",
    "blake3",
)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerators and operating system, as plain JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "memory_bytes": total_memory_bytes(),
        "os": _os_name(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the main libraries that are installed; imports none of them."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Commit of the checkout that the package was imported from, with `-dirty` where it has changes.

    Empty where the package was installed from elsewhere or git is missing.
    """
    package = Path(__file__).resolve().parents[1]
    root = package.parents[1]
    if not (root / ".git").exists():
        return ""
    revision = _git(root, "rev-parse", "HEAD")
    if not revision:
        return ""
    return f"{revision}-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else revision


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def total_memory_bytes() -> int:
    """Memory of the machine, or of this process's control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_value("memory.max")
    return total if limit is None else min(total, limit)


def available_memory_bytes() -> int:
    """Memory that a new process could use without swapping."""
    available = _meminfo_bytes("MemAvailable")
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return total_memory_bytes()


def _cgroup_value(name: str) -> int | None:
    """A figure of the control group (v2) as this process sees it; None where there is no limit."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _gpus() -> list[str]:
    """Names of the NVIDIA devices, from the driver; empty without one."""
    root = Path("/proc/driver/nvidia/gpus")
    if not root.is_dir():
        return []
    names: list[str] = []
    for information in sorted(root.glob("*/information")):
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
        names.extend(line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    return names


def _git(root: Path, *words: str) -> str:
    try:
        return run_git(root, *words, timeout_s=10.0).decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError):
        return ""
