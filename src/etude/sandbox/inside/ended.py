"""How background commands ended: kept for later questions, as far as there is room."""

from __future__ import annotations

from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.jobs import Job

MAX_ENDED = 256
MAX_ENDED_BYTES = 16 << 20
"""Ended background commands, and their output, that are kept for later questions; the oldest go first."""


class EndedCommands:
    """Results of background commands, by process id."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Job, Header, bytes]] = {}
        self._held_bytes = 0

    def keep(self, job: Job, answer: Header, payload: bytes) -> None:
        """Remembers how a command ended: its caller may have been gone by then."""
        self._drop(job.pid)
        self._rows[job.pid] = job, answer, payload
        self._held_bytes += len(payload)
        while len(self._rows) > MAX_ENDED or (self._held_bytes > MAX_ENDED_BYTES and len(self._rows) > 1):
            self._drop(next(iter(self._rows)))

    def find(self, pid: int) -> tuple[Job, Header, bytes]:
        """The command, its answer and its output. Raises Fault."""
        if pid not in self._rows:
            raise Fault("argument", f"no background command has the process id {pid}")
        return self._rows[pid]

    def unasked(self) -> list[tuple[int, Job, Header]]:
        """Those that nobody has waited for."""
        return [(pid, job, answer) for pid, (job, answer, _) in self._rows.items() if not job.waiting]

    def forget_request(self, request_id: int) -> None:
        """Nobody waits for that request any longer."""
        for job, _, _ in self._rows.values():
            if request_id in job.waiting:
                job.waiting.remove(request_id)

    def _drop(self, pid: int) -> None:
        if pid in self._rows:
            self._held_bytes -= len(self._rows.pop(pid)[2])
