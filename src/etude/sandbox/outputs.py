"""Who hears what the commands of one sandbox print, as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.sandbox.inside.frames import Header
from etude.sandbox.types import OnOutput

_EARLY_BYTES, _MAX_EARLY = 1 << 20, 16
_PIECE_BYTES = 64
"""What keeping a piece costs beside its bytes."""


@dataclass
class _Early:
    """Output for which nobody has asked yet."""

    pieces: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    room_bytes: int = _EARLY_BYTES


class Outputs:
    """Listeners by request (commands that somebody waits for) and by process id (those in the background)."""

    def __init__(self) -> None:
        self._by_request: dict[int, OnOutput] = {}
        self._by_pid: dict[int, OnOutput] = {}
        self._early: dict[int, _Early] = {}

    def expect(self, request_id: int, on_output: OnOutput) -> None:
        """From now on `on_output` gets the output of what a request started."""
        self._by_request[request_id] = on_output

    def answered(self, request_id: int) -> None:
        """The request has its answer: what still comes for it goes to nobody."""
        self._by_request.pop(request_id, None)

    def listen(self, pid: int, on_output: OnOutput) -> None:
        """From now on `on_output` gets the output of a background command, and what has come already."""
        self._by_pid[pid] = on_output
        for number, data in self._early.pop(pid, _Early()).pieces:
            on_output(number, data)

    def ended(self, pid: int) -> None:
        """A background command has ended."""
        self._by_pid.pop(pid, None)
        self._early.pop(pid, None)

    def on_event(self, header: Header, payload: bytes) -> None:
        """An `output` event, whose fields `answers.frame_problem` has looked at."""
        listener = self._by_request.get(header["id"]) or self._by_pid.get(header["pid"])
        if listener is not None:
            listener(header["fd"], payload)
        elif not header["id"]:
            self._keep_early(header["pid"], header["fd"], payload)

    def _keep_early(self, pid: int, number: int, data: bytes) -> None:
        """Output may be here before whoever started the command has heard of its process id."""
        early = self._early.setdefault(pid, _Early())
        if early.room_bytes > 0:
            early.pieces.append((number, data[: early.room_bytes]))
            early.room_bytes -= len(data) + _PIECE_BYTES
        while len(self._early) > _MAX_EARLY:
            # Nobody will ever ask for this one: its start was cancelled.
            del self._early[next(iter(self._early))]
