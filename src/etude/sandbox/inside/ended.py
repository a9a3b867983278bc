"""Results of ended background commands, kept within bounds for later requests."""

from __future__ import annotations

from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.jobs import Job

MAX_ENDED = 256
MAX_ENDED_BYTES = 16 << 20
"""Most results, and bytes of their output, that are kept; the oldest are dropped first."""


class EndedCommands:
    """Results of background commands, by process id."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Job, Header, bytes]] = {}
        self._held_bytes = 0

    def add(self, job: Job, answer: Header, payload: bytes) -> None:
        """Stores the result of a command whose caller may ask for it later."""
        self._drop(job.pid)
        self._rows[job.pid] = job, answer, payload
        self._held_bytes += len(payload)
        while len(self._rows) > MAX_ENDED or (self._held_bytes > MAX_ENDED_BYTES and len(self._rows) > 1):
            self._drop(next(iter(self._rows)))

    def find(self, pid: int) -> tuple[Job, Header, bytes]:
        """(command, answer, output) of a process id. Raises Fault."""
        if pid not in self._rows:
            raise Fault("argument", f"no background command has the process id {pid}")
        return self._rows[pid]

    def unawaited(self) -> list[tuple[int, Job, Header]]:
        """Rows of the commands that no request has waited for."""
        return [(pid, job, answer) for pid, (job, answer, _) in self._rows.items() if not job.waiting]

    def forget_request(self, request_id: int) -> None:
        """Removes a cancelled request from the waiting ones."""
        for job, _, _ in self._rows.values():
            if request_id in job.waiting:
                job.waiting.remove(request_id)

    def _drop(self, pid: int) -> None:
        if pid in self._rows:
            self._held_bytes -= len(self._rows.pop(pid)[2])
