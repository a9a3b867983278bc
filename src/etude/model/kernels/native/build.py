"""Compiles the C sources beside this file for this processor on first use, and keeps the result."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from etude.errors import ResourceError

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # what is fused is said in the source: copies of a loop must not differ
)
_TARGETS = ("-march=native", "-mcpu=native", None)
_TIMEOUT_S = 120.0
_SIZES = (
    "etude_packed_size",
    "etude_scratch_bytes",
    "etude_sample_floats",
    "etude_attention_floats",
    "etude_expert_floats",
)
"""Functions that return a size; all others return nothing."""
_CALLS = ("etude_pack", "etude_forward", "etude_sample", "etude_rows", "etude_attention", "etude_experts")


def find_compiler() -> list[str] | None:
    """The command of a C compiler: $CC alone where it is set, else cc, gcc or clang; None without one."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, compiled if no cached one fits. Raises ResourceError without a compiler that does it."""
    compiler = find_compiler()
    if compiler is None:
        raise _failure("no C compiler was found", os.environ.get("CC"))
    directory = Path(str(files("etude.model.kernels.native")))
    sources = sorted([*directory.glob("*.c"), *directory.glob("*.h")])
    target = _cache_directory() / f"native-{_key(compiler, sources)}.so"
    if not target.exists():
        _compile(compiler, [str(path) for path in sources if path.suffix == ".c"], target)
    try:
        library = ctypes.CDLL(str(target))
    except OSError as error:
        raise _failure(f"the compiled library does not load: {error}", shlex.join(compiler)) from error
    for name in _SIZES:
        getattr(library, name).restype = ctypes.c_int64
    for name in _CALLS:
        getattr(library, name).restype = None
    return library


def _compile(compiler: Sequence[str], sources: Sequence[str], target: Path) -> None:
    """Writes `target` whole or not at all, so that processes may race for it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        output = Path(directory) / target.name
        problems = ""
        for processor in _TARGETS:
            flags = [*_FLAGS, *([processor] if processor else [])]
            problems = _run([*compiler, *flags, *sources, "-o", str(output), "-lm"])
            if output.exists() and not problems:
                output.replace(target)
                return
    reason = problems.strip()[-500:] or "it wrote no library"
    raise _failure(f"compiling failed: {reason}", shlex.join(compiler))


def _run(command: Sequence[str]) -> str:
    """Runs the compiler; returns what it complains of, empty if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr or f"exit status {done.returncode}") if done.returncode else ""


def _key(compiler: Sequence[str], sources: Sequence[Path]) -> str:
    """Whatever decides the machine code: sources, flags, compiler and processor."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [f"{path.name}\0{path.read_text(encoding='utf-8')}" for path in sources]
    return xxh3_128_hexdigest("\0".join((*texts, *_FLAGS, *compiler, version, _processor())).encode())


def _processor() -> str:
    """The processor's features, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache_directory() -> Path:
    """Where compiled libraries stay: $XDG_CACHE_HOME/etude or ~/.cache/etude, else a temporary directory."""
    try:
        wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except (OSError, RuntimeError):  # no home directory, or none that can be written
        pass
    return _own_temporary_directory()


@functools.cache
def _own_temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="etude-native-"))


def _failure(problem: str, compiler: str | None) -> ResourceError:
    return ResourceError(
        problem,
        field="engine.kernels",
        received=compiler or "native",
        fix="install a C compiler such as gcc, or set engine.kernels=eager",
    )
