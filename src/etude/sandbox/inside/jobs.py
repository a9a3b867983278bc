"""One command or test run: a child process, its input, its bounded output and its deadline."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from etude.sandbox.inside import testrunner
from etude.sandbox.inside.rights import change_user

_CHUNK = 1 << 16
_RESTORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGALRM,
                     signal.SIGCHLD)  # fmt: skip
WARM_MODULES = ("collections", "copy", "dataclasses", "datetime", "functools", "heapq", "itertools", "math",
                "random", "re", "string", "typing")  # fmt: skip
"""Modules that a server imports at its start, so that test runs need not."""

Child = Callable[[list[int]], int]
"""Function that starts a child with the given pipe ends and returns its process id. Raises OSError."""


@dataclass(frozen=True)
class ChildLimits:
    """Resource limits and user of each process of a job."""

    memory_bytes: int
    cpu_s: int
    open_files: int = 1024
    uid: int | None = None
    """User and group to change to; None: those of the server."""

    def apply(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, self.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_s, self.cpu_s))
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))
        if self.uid is not None:
            change_user(self.uid, self.uid)

    def in_shell(self) -> str:
        """Shell prefix that sets the limits which this process cannot have itself."""
        return f"ulimit -n {self.open_files}; ulimit -t {self.cpu_s}; "


class Output:
    """The output of one pipe, kept up to a limit: the first and the last half of the limit."""

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._limit_bytes = limit_bytes
        self.ended = False
        self.truncated = False
        self._data = bytearray()
        self._poll: select.poll | None = None

    def register(self, poll: select.poll) -> None:
        """Registers the pipe with a poll object, until `unregister` or the end of the stream."""
        self._poll = poll
        poll.register(self.descriptor, select.POLLIN)

    def unregister(self) -> None:
        """Unregisters the pipe. Idempotent."""
        poll, self._poll = self._poll, None
        if poll is not None:
            poll.unregister(self.descriptor)

    def read(self) -> bytes:
        """Reads and returns what is available; sets `ended` at the end of the stream.

        One call reads little more than the limit: an endless writer cannot block the server.
        """
        taken = bytearray()
        while len(taken) <= self._limit_bytes:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                self.unregister()
                break
            taken += data
            if len(data) < _CHUNK:
                break
        self._data += taken
        if len(self._data) > 2 * self._limit_bytes + _CHUNK:
            self.trim()
        return bytes(taken)

    def trim(self) -> None:
        """Removes the middle of data that exceeds the limit."""
        if len(self._data) > self._limit_bytes:
            self.truncated = True
            head = self._limit_bytes // 2
            tail = self._limit_bytes - head
            del self._data[head : len(self._data) - tail]

    def pop_data(self) -> bytes:
        """Returns the kept data and clears it."""
        self.trim()
        data, self._data = bytes(self._data), bytearray()
        return data

    def close(self) -> None:
        """Closes the pipe. A closed descriptor that is still registered would keep `poll` from sleeping."""
        self.unregister()
        os.close(self.descriptor)


class Input:
    """The standard input of a child, with data that is not written yet."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        self._unsent = bytearray()
        self._closing = False

    @property
    def pending(self) -> bool:
        return not self.closed and bool(self._unsent)

    def write(self, data: bytes, close: bool) -> None:
        """Writes as much as the pipe accepts; the rest waits for `flush`."""
        self._unsent += data
        self._closing = self._closing or close
        self.flush()

    def flush(self) -> None:
        if self.closed:
            return
        try:
            while self._unsent:
                del self._unsent[: os.write(self.descriptor, self._unsent[:_CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent.clear()
            self._closing = True
        if self._closing:
            self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.descriptor)


@dataclass
class Job:
    """A running child. `existing`: the processes that existed before it."""

    pid: int
    pidfd: int
    """Readable once the child has ended."""
    outputs: list[Output]
    start_s: float
    timeout_s: float
    """Time limit; infinite if there is none."""
    deadline_s: float
    """When to check whether to end it: see `processes.extension_s`."""
    existing: set[int]
    keep_background: bool
    """Whether processes that the child leaves behind are kept."""
    request_id: int = 0
    """The request to answer at its end; 0: it runs in the background."""
    started_by: int = 0
    """The request that started it in the background; events of its output carry this id."""
    cmd: str = ""
    stream: bool = False
    """Whether output is sent as it arrives."""
    input: Input | None = None
    timed_out: bool = False
    memory_exceeded: bool = False
    waiting: list[int] = field(default_factory=list)
    """Requests that wait for the end of a background job."""

    def exclude_pause(self, since_s: float, now_s: float) -> None:
        """Shifts start and deadline by the time for which it was frozen."""
        paused_s = now_s - max(since_s, self.start_s)
        self.start_s += paused_s
        self.deadline_s += paused_s


def start_job(
    child: Child,
    num_pipes: int,
    limit_bytes: int,
    timeout_s: float | None,
    existing: set[int],
    keep_background: bool,
    with_input: bool,
) -> Job:
    """Starts `child` with the reading end of its input (if any) and `num_pipes` writing ends.

    Raises OSError.
    """
    pairs: list[tuple[int, int]] = []
    start_s = time.monotonic()
    try:
        for _ in range(num_pipes + with_input):
            pairs.append(os.pipe())
        inputs = [reader for reader, _ in pairs[num_pipes:]]
        pid = child([*inputs, *(writer for _, writer in pairs[:num_pipes])])
    except OSError:
        _close_all(pairs)
        raise
    pipes, inward = pairs[:num_pipes], pairs[num_pipes] if with_input else None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        _close_all(pairs)
        raise
    for _, writer in pipes:
        os.close(writer)
    stdin = None
    if inward:
        os.close(inward[0])
        stdin = Input(inward[1])
    outputs = [Output(reader, limit_bytes) for reader, _ in pipes]
    most_s = float("inf") if timeout_s is None else timeout_s
    return Job(pid, pidfd, outputs, start_s, most_s, start_s + most_s, existing, keep_background, input=stdin)


def _close_all(pairs: Sequence[tuple[int, int]]) -> None:
    for pair in pairs:
        for descriptor in pair:
            os.close(descriptor)


def _forked_child(argv: list[str], env: dict[str, str], cwd: str, limits: ChildLimits) -> Child:
    """A child that executes a program. Gets [stdout, stderr], or [stdin, stdout, stderr]."""

    def execute(pipes: list[int]) -> NoReturn:
        _detach(pipes if len(pipes) > 2 else [os.open("/dev/null", os.O_RDONLY), *pipes])
        for number in _RESTORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        try:
            limits.apply()
            os.chdir(cwd)
        except OSError as error:
            os.write(2, f"cannot enter {cwd}: {error.strerror}\n".encode())
            os._exit(126)
        try:
            os.execve(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
            os._exit(127)

    return lambda pipes: _fork(execute, pipes)


def shell_child(cmd: str, env: dict[str, str], cwd: str, limits: ChildLimits) -> Child:
    """A child that runs a shell command. Gets [stdout, stderr], or [stdin, stdout, stderr].

    Without a change of user it is spawned, which copies nothing of this process and so takes half the time
    of a fork. Its memory is bounded by this process's own limit (see `limit_own_memory`); the shell sets its
    other limits itself, before it reads the command.
    """
    limited = limits.in_shell() + cmd
    forked = _forked_child(["/bin/sh", "-c", cmd], env, cwd, limits)

    def launch(pipes: list[int]) -> int:
        if limits.uid is None:
            try:
                return _spawn(["/bin/sh", "-c", limited], env, cwd, pipes)
            except BlockingIOError:
                raise
            except OSError:
                # The directory or the shell is missing: a forked child reports that in its own output.
                return forked(pipes)
        return forked(pipes)

    return launch


def limit_own_memory(memory_bytes: int) -> None:
    """Bounds this process's memory, and so that of all processes that it spawns."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _fork(run: Callable[[list[int]], NoReturn], pipes: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run(pipes)
        finally:
            os._exit(127)
    return pid


def _spawn(argv: list[str], env: dict[str, str], cwd: str, pipes: list[int]) -> int:
    """posix_spawn(3). All other descriptors are close-on-exec."""
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
    if len(pipes) == 2:
        actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
    first = 3 - len(pipes) if len(pipes) == 2 else 0
    actions += [(os.POSIX_SPAWN_DUP2, pipe, first + index) for index, pipe in enumerate(pipes)]
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(cwd)
        return os.posix_spawn(
            argv[0], argv, env, file_actions=actions, setsid=True, setsigdef=_RESTORED_SIGNALS
        )
    finally:
        # The program runs already and may have locked the directory, which is no reason to run it again.
        # Our own directory does not matter: each start of a program names one.
        with contextlib.suppress(OSError):
            os.fchdir(here)
        os.close(here)


def tests_child(paths: Sequence[str], root: str, probe: bool, limits: ChildLimits) -> Child:
    """A child that runs test files and writes the JSON result to its pipe."""

    def run(pipes: list[int]) -> NoReturn:
        null = os.open("/dev/null", os.O_RDWR)
        _detach([null, null, null, pipes[0]])
        for number in _RESTORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        limits.apply()
        os.chdir(root)
        gc.enable()
        source = DirectorySource(root)
        runner = testrunner.run_probe_files if probe else testrunner.run_test_files
        data = json.dumps(runner(source, paths)).encode()
        while data:
            data = data[os.write(3, data) :]
        os._exit(0)

    return lambda pipes: _fork(run, pipes)


def _detach(descriptors: list[int]) -> None:
    """Starts a new session, with the given descriptors as 0, 1, 2, ... and no others."""
    os.setsid()
    # Copied above all of them first: none may be overwritten before it is copied.
    beyond = max(*descriptors, len(descriptors)) + 1
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in descriptors]
    for index, descriptor in enumerate(high):
        os.dup2(descriptor, index)
    os.closerange(len(high), resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class DirectorySource:
    """`Source` of the workspace modules in a directory. Only regular files count."""

    def __init__(self, root: str) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        full = os.path.join(self._root, path)
        if not os.path.isfile(full):
            return None
        with open(full, "rb") as file:
            return file.read(8 << 20).decode(errors="replace")

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(os.path.join(self._root, path))

    def entries(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self._root, path)))
        except OSError:
            return []
