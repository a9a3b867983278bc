"""Compiles C sources for the processor of this machine, once, and caches the result.

Used by every layer with native code: the transformer's kernels and the codec of weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from etude.errors import ResourceError
from etude.kit.durable import write_bytes
from etude.kit.locks import locked

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # the sources fuse explicitly: copies of a loop must not differ
)
_TARGETS = ("-march=native", "-mcpu=native", None)
_SHORTAGES = (
    *("Killed", "Terminated", "out of memory", "annot allocate memory", "Resource temporarily unavailable"),
    *("No space left", "Disk quota exceeded"),
)
"""Messages of compilers that were killed, or lacked memory, a process or disk space."""
_TIMEOUT_S = 900.0
"""On an idle machine a compilation takes some seconds."""


def find_compiler() -> list[str] | None:
    """The command of a C compiler: $CC if it is set, otherwise cc, gcc or clang; None without one."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    return None


def compile_library(
    directory: Path, *, field: str, fix: str, flags: Sequence[str] = (), timeout_s: float = _TIMEOUT_S
) -> ctypes.CDLL:
    """Loads the library of a directory's C sources, compiled if no cached one fits. Callers should keep it.

    `field` and `fix`: for the error, since the alternative to a compiler depends on the caller. `flags`:
    additional compiler flags. `timeout_s`: for one source; it is long, for machines under load. Raises
    ResourceError without a suitable compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise _failure("no C compiler was found", os.environ.get("CC"), field, fix)
    sources = sorted([*directory.glob("*.c"), *directory.glob("*.h")])
    every_flag = (*_FLAGS, *flags)
    try:
        target = _cache_directory() / f"{directory.name}-{_key(compiler, every_flag, sources)}.so"
        with locked(target.parent):
            with contextlib.suppress(OSError):  # none is cached, or a damaged one
                return ctypes.CDLL(str(target))
            units = [path for path in sources if path.suffix == ".c"]
            _compile([*compiler, *every_flag], units, target, timeout_s)
    except (_CompilerFailure, OSError) as failure:
        raise _failure(f"compiling failed: {failure}", shlex.join(compiler), field, fix) from failure
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        problem = f"the compiled library does not load: {error}"
        raise _failure(problem, shlex.join(compiler), field, fix) from error


class _CompilerFailure(Exception):
    """The compiler's error message."""


def _compile(command: Sequence[str], sources: Sequence[Path], target: Path, timeout_s: float) -> None:
    """Writes `target` atomically."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        for processor in _TARGETS:
            own = [processor] if processor else []
            try:
                _build([*command, *own], sources, Path(directory) / target.name, timeout_s)
            except _CompilerFailure:
                # The compiler may not know the option. After a timeout, there is no fallback to code for any
                # processor, which would then be cached.
                if processor is None:
                    raise
            else:
                write_bytes(target, (Path(directory) / target.name).read_bytes(), mode=0o755)
                return


def _build(command: Sequence[str], sources: Sequence[Path], output: Path, timeout_s: float) -> None:
    """Compiles the sources in parallel, and links them."""
    objects = [str(output.with_name(f"{source.stem}.o")) for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        calls = [
            pool.submit(_run, [*command, "-c", str(source), "-o", made], timeout_s)
            for source, made in zip(sources, objects, strict=True)
        ]
        for call in calls:
            call.result()
    _run([*command, "-shared", *objects, "-o", str(output), "-lm"], timeout_s)
    if not output.exists():
        raise _CompilerFailure("it wrote no library")


def _run(command: Sequence[str], timeout_s: float) -> None:
    """Runs the compiler. Raises _CompilerFailure if it reports an error, OSError if it does not complete."""
    english = {**os.environ, "LC_ALL": "C"}  # the language of `_SHORTAGES`
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=english
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} took more than {timeout_s:g} s") from error
    if done.returncode == 0:
        return
    complaint = done.stderr.strip()[-500:] or f"exit status {done.returncode}"
    if done.returncode < 0 or any(word in complaint for word in _SHORTAGES):
        raise OSError(complaint)  # a failure of the machine, not of the source
    raise _CompilerFailure(complaint)


def _key(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path]) -> str:
    """Hash of everything that determines the machine code: sources, flags, compiler and processor."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [f"{path.name}\0{path.read_text(encoding='utf-8')}" for path in sources]
    return xxh3_128_hexdigest("\0".join((*texts, *flags, *compiler, version, _processor())).encode())


def _processor() -> str:
    """The processor's features, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache_directory() -> Path:
    """Cache of compiled libraries: $XDG_CACHE_HOME/etude or ~/.cache/etude, or a temporary directory."""
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
