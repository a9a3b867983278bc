"""Compiles C sources for the processor that runs them, once, and keeps the result.

One home for every layer that has native code: the transformer's kernels and the codec of weights.
"""

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


def find_compiler() -> list[str] | None:
    """The command of a C compiler: $CC alone where it is set, else cc, gcc or clang; None without one."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    return None


def compile_library(directory: Path, *, field: str, fix: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of a directory's C sources, compiled if no cached one fits. Slow the first time: cache it.

    `field` and `fix`: what the error names, since what to do without a compiler differs by caller. `flags`:
    the compiler's, beside those for speed. Raises ResourceError without a compiler that does it.
    """
    compiler = find_compiler()
    if compiler is None:
        raise _failure("no C compiler was found", os.environ.get("CC"), field, fix)
    sources = sorted([*directory.glob("*.c"), *directory.glob("*.h")])
    every_flag = (*_FLAGS, *flags)
    target = _cache_directory() / f"{directory.name}-{_key(compiler, every_flag, sources)}.so"
    try:
        if not target.exists():
            _compile(compiler, every_flag, [str(path) for path in sources if path.suffix == ".c"], target)
        return ctypes.CDLL(str(target))
    except _CompilerFailure as failure:
        raise _failure(f"compiling failed: {failure}", shlex.join(compiler), field, fix) from failure
    except OSError as error:
        problem = f"the compiled library does not load: {error}"
        raise _failure(problem, shlex.join(compiler), field, fix) from error


class _CompilerFailure(Exception):
    """What the compiler complains of."""


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[str], target: Path) -> None:
    """Writes `target` whole or not at all, so that processes may race for it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        output = Path(directory) / target.name
        problems = ""
        for processor in _TARGETS:
            own = [processor] if processor else []
            problems = _run([*compiler, *flags, *own, *sources, "-o", str(output), "-lm"])
            if output.exists() and not problems:
                output.replace(target)
                return
    raise _CompilerFailure(problems.strip()[-500:] or "it wrote no library")


def _run(command: Sequence[str]) -> str:
    """Runs the compiler; returns what it complains of, empty if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr or f"exit status {done.returncode}") if done.returncode else ""


def _key(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path]) -> str:
    """Whatever decides the machine code: sources, flags, compiler and processor."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [f"{path.name}\0{path.read_text(encoding='utf-8')}" for path in sources]
    return xxh3_128_hexdigest("\0".join((*texts, *flags, *compiler, version, _processor())).encode())


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


def _failure(problem: str, compiler: str | None, field: str, fix: str) -> ResourceError:
    return ResourceError(problem, field=field, received=compiler or "native", fix=fix)
