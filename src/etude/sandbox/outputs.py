"""Who hears what the commands of one sandbox print, as it comes."""

from __future__ import annotations

from etude.sandbox.inside.frames import Header
from etude.sandbox.types import OnOutput


class Outputs:
    """Listeners by the request that started a command; of one in the background until it has ended."""

    def __init__(self) -> None:
        self._by_request: dict[int, OnOutput] = {}
        self._in_background: dict[int, int] = {}
        """Process id -> the request that started it."""

    def expect(self, request_id: int, on_output: OnOutput) -> None:
        """From now on `on_output` gets the output of what a request starts."""
        self._by_request[request_id] = on_output

    def started(self, pid: int, request_id: int) -> None:
        """A request has started a command in the background."""
        self._in_background[pid] = request_id

    def answered(self, request_id: int) -> None:
        """What still comes for the request goes to nobody, unless it started a command in the background."""
        if request_id not in self._in_background.values():
            self._by_request.pop(request_id, None)

    def ended(self, pid: int) -> None:
        """A background command has ended."""
        self._by_request.pop(self._in_background.pop(pid, 0), None)

    def on_event(self, header: Header, payload: bytes) -> None:
        """An `output` event, whose fields `answers.frame_problem` has looked at."""
        listener = self._by_request.get(header["id"])
        if listener is not None:
            listener(header["fd"], payload)
