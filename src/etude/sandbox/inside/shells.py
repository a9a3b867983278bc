"""Shell sessions: one shell that lives on between commands, so that all of its state does.

The shell reads commands from a pipe and runs each with `eval` in itself; a last `printf` tells the exit
status through a pipe of its own, so that no output can be mistaken for it. What a background job prints
between two commands counts to the next one, as on a terminal.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import time

from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.jobs import Child, Input, Job, Output, start_job
from etude.sandbox.inside.processes import Table, extension_s, families

STATUS_DESCRIPTOR = 3
_STATUS_BYTES = 64
"""The longest line that tells a status; whatever else comes through that pipe is not ours."""
_MAX_LINES = 64
_IDLE_BYTES = 64 << 10
"""How much of what is printed between two commands is kept."""
GRACE_S = 1.0
"""How long a shell may take to notice that the command it waited for was killed, its waits for a processor
apart."""


def shell_program() -> str:
    """bash where there is one: it alone survives every mistake in a command."""
    return "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"


class Shell:
    """One session. At most one command at a time."""

    def __init__(self, name: str, child: Child, poll: select.poll) -> None:
        """Starts the shell. Raises OSError."""
        self.name = name
        self.job: Job = start_job(child, 3, _IDLE_BYTES, None, set(), keep_background=True, with_input=True)
        self.request_id = 0
        """The command that runs; 0: none."""
        self.deadline_s = float("inf")
        self.spare: set[int] = set()
        """What ran before the present command began."""
        self._poll = poll
        self._timed_out = False
        self._kill_at_s = float("inf")
        self._killed_s = 0.0
        """When the present command was killed; and the processor time that it had had by then."""
        self._killed_processor_s = 0.0
        self._start_s = 0.0
        self._timeout_s = 0.0
        self._before_s = 0.0
        self._status = b""
        self._watches_stdin = False
        self.cancelled = False
        """Whether nobody waits for the present command any longer."""
        self.queue: list[tuple[Header, Table]] = []
        """Commands that came while a cancelled one was still ending, each with what ran before it."""
        for output in self.job.outputs:
            output.listen(poll)

    @property
    def _streams(self) -> list[Output]:
        return self.job.outputs[:2]

    @property
    def stdin(self) -> Input:
        """The pipe from which the shell reads commands."""
        assert self.job.input is not None, "a shell is started with an input"
        return self.job.input

    def run(self, request_id: int, cmd: str, timeout_s: float, limit_bytes: int, before: Table) -> None:
        """Begins a command; `settle` tells when it has ended. `before`: what runs already."""
        for output in self._streams:
            output.limit_bytes = limit_bytes
        self.cancelled = False
        self.request_id = request_id
        self.spare = set(before)
        shell = before.get(self.job.pid)
        self._before_s = shell.processor_s if shell is not None else 0.0
        self._start_s = time.monotonic()
        self._timeout_s = timeout_s
        self.deadline_s = self._start_s + timeout_s
        self._timed_out = False
        self._kill_at_s = float("inf")
        status = STATUS_DESCRIPTOR
        # The number tells this command's status from what an earlier one may have left in the pipe.
        # One simple command: after some syntax errors bash no longer knows what a brace is.
        tell = f"command printf '\\n%d %d\\n' $? {request_id} >&{status} 2>/dev/null"
        line = f"command eval {shlex.quote(cmd)} </dev/null {status}>&-\n{tell}\n"
        self._feed(line.encode(errors="surrogateescape"))

    def owns(self, descriptor: int) -> bool:
        if self._watches_stdin and descriptor == self.stdin.descriptor:
            return True
        return any(output.descriptor == descriptor for output in self.job.outputs)

    def on_ready(self, descriptor: int) -> None:
        """Takes what one of the shell's pipes holds, or gives what its input takes."""
        if self._watches_stdin and descriptor == self.stdin.descriptor:
            self._feed(b"")
            return
        for index, output in enumerate(self.job.outputs):
            if output.descriptor == descriptor:
                data = output.read()
                if index == 2:
                    output.take()
                    # What is no status line may be of any length.
                    self._status = b"\n".join(
                        line[:_STATUS_BYTES] for line in (self._status + data).split(b"\n")[-_MAX_LINES:]
                    )

    def _feed(self, data: bytes) -> None:
        """Gives the shell its next lines, as fast as it reads them."""
        descriptor = self.stdin.descriptor
        self.stdin.write(data, close=False)
        if self.stdin.pending:
            self._poll.register(descriptor, select.POLLOUT)
            self._watches_stdin = True
        elif self._watches_stdin:
            self._poll.unregister(descriptor)
            self._watches_stdin = False

    def put_off(self, since_s: float, now_s: float) -> None:
        """It stood still in between: that does not count as the present command's time."""
        stood_s = now_s - max(since_s, self._start_s)
        self._start_s += stood_s
        self._killed_s += stood_s
        self._kill_at_s += stood_s
        if not self.cancelled:
            self.deadline_s += stood_s

    def next_deadline_s(self) -> float:
        """When `expire` wants to be asked again."""
        return min(self.deadline_s, self._kill_at_s)

    def expire(self, table: Table, now_s: float) -> str:
        """What is due: "command" (kill what it started), "shell" (kill the shell itself) or "".

        Either is put off while it waits for a processor: see `extension_s`.
        """
        own = families(table, [self.job.pid]) - self.spare | {self.job.pid}
        rows = [table[pid] for pid in own if pid in table]
        if self.request_id and now_s >= self._kill_at_s:
            more_s = extension_s(rows, GRACE_S, now_s - self._killed_s, self._killed_processor_s)
            self._kill_at_s = now_s + more_s
            return "" if more_s > 0 else "shell"
        if self.request_id and now_s >= self.deadline_s:
            more_s = extension_s(rows, self._timeout_s, now_s - self._start_s, self._before_s)
            if more_s > 0 and not self.cancelled:
                self.deadline_s = now_s + more_s
                return ""
            self._timed_out = True
            self.deadline_s = float("inf")
            self._kill_at_s = now_s + GRACE_S
            self._killed_s, self._killed_processor_s = now_s, sum(row.processor_s for row in rows)
            return "command"
        return ""

    def settle(self, exit_status: int | None) -> tuple[Header, bytes] | None:
        """The answer to the command if it has ended; `exit_status`: the shell's own, if it has ended."""
        if not self.request_id:
            return None
        code = self._told_status()
        if code is None:
            code = exit_status
        if code is None:
            return None
        for output in self._streams:
            output.read()
        data = [output.take() for output in self._streams]
        truncated = any(output.truncated for output in self._streams)
        for output in self._streams:
            output.truncated = False
            output.limit_bytes = _IDLE_BYTES
        header: Header = {
            "id": self.request_id,
            "exit_code": -signal.SIGKILL if self._timed_out else code,
            "timed_out": self._timed_out,
            "memory_exceeded": self.job.memory_exceeded,
            "duration_s": time.monotonic() - self._start_s,
            "truncated": truncated,
            "sizes": [len(part) for part in data],
            "closed": exit_status is not None,
        }
        self.request_id = 0
        # What comes from now on finds the shell free: nothing would ever take it out of the queue.
        self.cancelled = False
        self.deadline_s = self._kill_at_s = float("inf")
        return header, b"".join(data)

    def _told_status(self) -> int | None:
        """The exit status of the present command, if the shell has told it."""
        *lines, rest = self._status.split(b"\n")
        self._status = rest
        for line in lines:
            code, _, number = line.partition(b" ")
            if code.isdigit() and number == b"%d" % self.request_id:
                return _signal_as_negative(int(code))
        return None

    def close(self) -> None:
        """Closes the shell's pipes."""
        if self._watches_stdin:
            self._poll.unregister(self.stdin.descriptor)
        for output in self.job.outputs:
            output.close()
        self.stdin.close()
        os.close(self.job.watch)


def _signal_as_negative(code: int) -> int:
    """A shell says 128 + n for signal n; everywhere here that is -n."""
    return code if code <= 128 or code > 192 else 128 - code
