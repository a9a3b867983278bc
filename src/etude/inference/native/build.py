"""Compiles `forward.c` for this processor on first use, and keeps the result."""

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
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",  # sums in vectors: another order than the source's, the same at every call
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


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, compiled if no cached one fits. Raises ResourceError without a compiler that does it."""
    compiler = find_compiler()
    if compiler is None:
        raise _failure("no C compiler was found", os.environ.get("CC"))
    source = Path(str(files("etude.inference.native") / "forward.c")).read_text(encoding="utf-8")
    target = _cache_directory() / f"forward-{_key(compiler, source)}.so"
    if not target.exists():
        _compile(compiler, source, target)
    try:
        library = ctypes.CDLL(str(target))
    except OSError as error:
        raise _failure(f"the compiled library does not load: {error}", shlex.join(compiler)) from error
    library.etude_scratch_floats.restype = ctypes.c_int64
    library.etude_forward.restype = library.etude_sample.restype = None
    return library


def _compile(compiler: Sequence[str], source: str, target: Path) -> None:
    """Writes `target` whole or not at all, so that processes may race for it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        output = Path(directory) / target.name
        problems = ""
        for processor in _TARGETS:
            flags = [*_FLAGS, *([processor] if processor else [])]
            problems = _run([*compiler, *flags, "-x", "c", "-", "-o", str(output), "-lm"], source)
            if output.exists() and not problems:
                output.replace(target)
                return
    reason = problems.strip()[-500:] or "it wrote no library"
    raise _failure(f"compiling failed: {reason}", shlex.join(compiler))


def _run(command: Sequence[str], source: str) -> str:
    """Runs the compiler; returns what it complains of, empty if it succeeded."""
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr or f"exit status {done.returncode}") if done.returncode else ""


def _key(compiler: Sequence[str], source: str) -> str:
    """Whatever decides the machine code: source, flags, compiler and processor."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return xxh3_128_hexdigest("\0".join((source, *_FLAGS, *compiler, version, _processor())).encode())


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
