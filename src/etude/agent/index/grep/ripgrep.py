"""Runs the installed ripgrep, which alone decides what matches."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.agent.index.grep.query import FileMatches
from etude.errors import SandboxError, ToolArgumentError
from etude.errors.packages import missing_package

_PRINT = ["--heading", "--null", "--line-number", "--color=never", "--with-filename", "--no-mmap"]
"""`--no-mmap`: a file that is cut short while it is mapped would kill the search."""
_READ_BYTES = 1 << 18
_CHECK_S = 10.0
_ABOUT_BINARY = re.compile(rb"\A[^\0]*?: (?:WARNING: stopped searching binary|binary) file [^\n]*\)\n+")


@dataclass(frozen=True, slots=True)
class Output:
    """Output of one run. `cut`: it was stopped at `max_bytes`."""

    stdout: bytes
    stderr: bytes
    status: int
    cut: bool


class Ripgrep:
    """The ripgrep executable, located once. Safe to use from several tasks."""

    def __init__(self) -> None:
        """Finds it next to this Python's executable or on the PATH. Raises ResourceError."""
        bundled = Path(sys.executable).parent / "rg"
        found = shutil.which(str(bundled)) or shutil.which("rg")
        if found is None:
            raise missing_package("searching with grep", "ripgrep", field="rg")
        self.program = Path(found)

    async def search(
        self,
        flags: Sequence[str],
        paths: Iterable[bytes],
        cwd: Path,
        *,
        deadline_s: float,
        max_bytes: int,
    ) -> Output:
        """Searches `paths` (files or directories, relative to `cwd`) with `flags`. Killed when cancelled,
        past the deadline and past `max_bytes` of output.

        Raises ToolArgumentError, with ripgrep's own message, for a pattern that it refuses, and past the
        deadline (the pattern is too expensive); SandboxError if ripgrep cannot be started.
        """
        arguments = [*_PRINT, *flags, "--", *(b"./" + path for path in paths)]
        output = await self._run(arguments, cwd, deadline_s, max_bytes)
        if output.status == 2 and not output.cut:
            await self.check_pattern(flags, cwd)  # else some file could not be read, which is no error here
        return output

    async def check_pattern(self, flags: Sequence[str], cwd: Path) -> None:
        """Lets ripgrep compile the pattern. Raises ToolArgumentError with its message if it refuses."""
        output = await self._run([*flags, "--", "/dev/null"], cwd, _CHECK_S, _READ_BYTES)
        if output.status == 2:
            words = output.stderr.decode("utf-8", "replace").strip().removeprefix("rg: ")
            raise ToolArgumentError(words or "ripgrep refuses this pattern", field="pattern")

    async def _run(
        self, arguments: Sequence[str | bytes], cwd: Path, deadline_s: float, max_bytes: int
    ) -> Output:
        running = _Running([str(self.program), "--no-config", *arguments], cwd, deadline_s, max_bytes)
        work = asyncio.ensure_future(asyncio.to_thread(running.collect))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            running.kill()
            await asyncio.wait([work])
            raise


class _Running:
    """One process, read in a thread: event loops read a pipe in small pieces."""

    def __init__(self, command: list[str | bytes], cwd: Path, deadline_s: float, max_bytes: int) -> None:
        self._command, self._cwd = command, cwd
        self._deadline_s, self._max_bytes = deadline_s, max_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def kill(self) -> None:
        """Ends the process now or, if it has not started, as soon as it does."""
        with self._lock:
            self._killed = True
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    def collect(self) -> Output:
        """Starts the process, reads its output to the end and reaps it."""
        with tempfile.TemporaryFile() as errors:
            process = self._start(errors.fileno())
            timer = threading.Timer(self._deadline_s, self.kill)
            timer.start()
            try:
                stdout, cut = self._read(process)
            finally:
                process.kill()
                status = process.wait()
                timer.cancel()
                assert process.stdout is not None
                process.stdout.close()
            if self._killed:
                raise ToolArgumentError(
                    f"the search took longer than {self._deadline_s:g} s",
                    field="pattern",
                    fix="search fewer files or for a simpler pattern",
                )
            errors.seek(0)
            return Output(stdout, errors.read(_READ_BYTES), status, cut)

    def _start(self, errors: int) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        except OSError as error:
            raise SandboxError(
                f"ripgrep could not be started: {error.strerror}", field="rg", received=str(self._command[0])
            ) from error
        with self._lock:
            self._process = process
            if self._killed:
                process.kill()
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
        """Its output, and whether that was cut at `max_bytes`."""
        assert process.stdout is not None
        pieces: list[bytes] = []
        size_bytes = 0
        while piece := os.read(process.stdout.fileno(), _READ_BYTES):
            pieces.append(piece)
            size_bytes += len(piece)
            if size_bytes > self._max_bytes:
                return b"".join(pieces), True
        process.wait()
        return b"".join(pieces), False


def parse_matches(output: Output) -> list[FileMatches]:
    """Splits what `search` printed by file, in order of printing. A cut file loses its last line.

    A file's block is `PATH NUL 12:line LF 15:line LF LF`, and each path begins with `./`. Nothing is copied.
    """
    printed = output.stdout
    found: list[FileMatches] = []
    nul = printed.find(b"\0")
    path = printed[: max(nul, 0)]
    while nul >= 0:
        following = printed.find(b"\0", nul + 1)
        end = printed.rfind(b"\n\n./", nul, following) if following >= 0 else len(printed)
        if following < 0 and output.cut:
            end = printed.rfind(b"\n", nul) + 1
        if end > nul + 1:
            found.append(FileMatches(_clean_path(path), printed, nul + 1, end))
        path = printed[end + 2 : following]
        nul = following
    return found


def _clean_path(path: bytes) -> bytes:
    while b"\n" in path and (about := _ABOUT_BINARY.match(path)) is not None:
        path = path[about.end() :]
    return path.removeprefix(b"./")


def sort_key(path: bytes) -> bytes:
    """Sorts paths as `rg --sort path` does: name by name, so `a/b` comes before `a.b`."""
    return path.replace(b"/", b"\0")  # which no name holds, and which comes before all that a name may hold
