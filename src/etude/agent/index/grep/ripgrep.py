"""Runs the installed ripgrep: the one judge of what matches and of which files count."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.agent.index.grep.query import FileMatches
from etude.errors import SandboxError, ToolArgumentError
from etude.errors.packages import missing_package

__all__ = ["Output", "Ripgrep", "parse_matches", "sort_key"]

_PRINT = (
    "--no-config",
    "--heading",
    "--null",
    "--line-number",
    "--color=never",
    "--with-filename",
    "--no-mmap",
)
"""`--no-mmap`: a file that is cut short while it is mapped would kill the search."""
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 18
_ABOUT_BINARY = re.compile(rb"\A[^\0]*?: (?:WARNING: stopped searching binary|binary) file [^\n]*\)\n+")


@dataclass(frozen=True, slots=True)
class Output:
    """What one run printed. `cut`: it was stopped at its bound of bytes."""

    stdout: bytes
    stderr: bytes
    status: int
    cut: bool


class Ripgrep:
    """The program, found once. Safe to use from several tasks."""

    def __init__(self, program: Path | None = None) -> None:
        """Takes `program`, else the one beside this Python or on the PATH. Raises ResourceError."""
        self.program = program or _find()

    async def run(
        self,
        arguments: Sequence[str | bytes],
        cwd: Path,
        *,
        deadline_s: float,
        max_bytes: int = 1 << 30,
        max_error_bytes: int = 1 << 16,
    ) -> Output:
        """Runs it in `cwd`. Killed when cancelled, past the deadline and past `max_bytes` of output.

        What it says on standard error beyond `max_error_bytes` is dropped.

        Raises: ToolArgumentError past the deadline (the pattern was too much), SandboxError if it cannot be
        started.
        """
        running = _Running([str(self.program), *arguments], cwd, deadline_s, max_bytes, max_error_bytes)
        work = asyncio.ensure_future(asyncio.to_thread(running.collect))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            running.kill()
            await asyncio.wait([work])
            raise

    async def search(
        self,
        flags: Sequence[str],
        paths: Iterable[bytes],
        cwd: Path,
        *,
        deadline_s: float,
        max_bytes: int,
        follow: bool = False,
    ) -> Output:
        """Searches `paths` (files or directories, relative to `cwd`) for what `flags` say.

        Raises ToolArgumentError, with ripgrep's own words, for a pattern that it refuses.
        """
        options = [*_PRINT, *(["--follow"] if follow else [])]
        arguments = [*options, *flags, "--", *(b"./" + path for path in paths)]
        output = await self.run(arguments, cwd, deadline_s=deadline_s, max_bytes=max_bytes)
        if output.status == 2 and not output.cut:
            await self.check_pattern(flags, cwd)  # else some file could not be read, which is no error here
        return output

    async def check_pattern(self, flags: Sequence[str], cwd: Path) -> None:
        """Lets ripgrep compile the pattern. Raises ToolArgumentError with its message if it refuses."""
        output = await self.run(["--no-config", *flags, "--", "/dev/null"], cwd, deadline_s=10.0)
        if output.status == 2:
            words = output.stderr.decode("utf-8", "replace").strip().removeprefix("rg: ")
            raise ToolArgumentError(words or "ripgrep refuses this pattern", field="pattern")


def _find() -> Path:
    beside = Path(sys.executable).parent / "rg"
    found = shutil.which(str(beside)) or shutil.which("rg")
    if found is None:
        raise missing_package("searching with grep", "ripgrep", field="rg")
    return Path(found)


class _Running:
    """One process and its two pipes, read in a thread: event loops read a pipe in small pieces."""

    def __init__(
        self, command: list[str | bytes], cwd: Path, deadline_s: float, max_bytes: int, max_error_bytes: int
    ) -> None:
        self._command, self._cwd = command, cwd
        self._deadline_s, self._max_bytes, self._max_error_bytes = deadline_s, max_bytes, max_error_bytes
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
        """Starts, reads to the end, reaps."""
        try:
            process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
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
        try:
            return self._read(process)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def _read(self, process: subprocess.Popen[bytes]) -> Output:
        assert process.stdout is not None and process.stderr is not None
        out, err = process.stdout.fileno(), process.stderr.fileno()
        _widen(out)
        ends = time.monotonic() + self._deadline_s
        pieces: dict[int, list[bytes]] = {out: [], err: []}
        sizes = {out: 0, err: 0}
        with selectors.PollSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            selector.register(err, selectors.EVENT_READ)
            while selector.get_map():
                remaining_s = ends - time.monotonic()
                if remaining_s <= 0:
                    raise ToolArgumentError(
                        f"the search took longer than {self._deadline_s:g} s",
                        field="pattern",
                        fix="search fewer files or for a simpler pattern",
                    )
                for key, _ in selector.select(remaining_s):
                    piece = os.read(key.fd, _READ_BYTES)
                    if not piece:
                        selector.unregister(key.fd)
                    elif key.fd == out or sizes[err] < self._max_error_bytes:
                        pieces[key.fd].append(piece)
                        sizes[key.fd] += len(piece)
                if sizes[out] > self._max_bytes:
                    return Output(b"".join(pieces[out]), b"".join(pieces[err]), 0, True)
        return Output(b"".join(pieces[out]), b"".join(pieces[err]), process.wait(), False)


def _widen(pipe: int) -> None:
    """A pipe of 1 MiB instead of 64 KiB, where it is allowed: fewer switches between the processes."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return  # over the limit of this user: it works with the smaller one


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
    """Order of paths as in `rg --sort path`: name by name, so `a/b` comes before `a.b`."""
    return path.replace(b"/", b"\0")  # which no name holds, and which comes before all that a name may hold
