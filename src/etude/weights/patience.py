"""A folder whose store may be away for a while: what it is asked is asked again until it answers.

Several callers at once wait by themselves; nobody holds up another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from etude.kit.retry import Backoff, retry
from etude.weights.folders import Folder, TakenError, UnavailableError

Answer = TypeVar("Answer")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


OnWait = Callable[[float, str], None]
"""Gets each call that was repeated, once it is answered or given up: seconds, and the last cause."""


class PatientFolder:
    """See Folder. Asks again what came back with UnavailableError, for so long; then it is raised."""

    def __init__(self, inner: Folder, patience_s: float, on_wait: OnWait | None = None) -> None:
        """`on_wait`: called in whichever thread has waited."""
        self._inner = inner
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._closed = threading.Event()
        self._waiting: dict[int, str] = {}
        """By thread: why it waits."""

    @property
    def trouble(self) -> str:
        """Why a call is being made again now; empty where none is. From any thread."""
        return next(iter(list(self._waiting.values())), "")

    def close(self) -> None:
        """Ends all waiting: from now on what is unavailable is so at once."""
        self._closed.set()

    @property
    def url(self) -> str:
        return self._inner.url

    def list(self, prefix: str) -> list[str]:
        return self._ask(lambda: self._inner.list(prefix))

    def read(self, name: str) -> bytes:
        return self._ask(lambda: self._inner.read(name))

    def write(self, name: str, data: bytes) -> None:
        self._ask(lambda: self._inner.write(name, data))

    def create(self, name: str, data: bytes) -> None:
        """See Folder.create. A name that is taken by these very bytes is our own, whose answer was lost on
        its way: the creator puts something into them that nobody else writes."""
        try:
            self._ask(lambda: self._inner.create(name, data))
        except TakenError:
            if self.read(name) != data:
                raise

    def delete(self, name: str) -> None:
        self._ask(lambda: self._inner.delete(name))

    def sweep(self, prefix: str) -> None:
        self._ask(lambda: self._inner.sweep(prefix))

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        began = time.monotonic()
        cause = ""

        def on_failure(failure: UnavailableError, pause_s: float | None) -> None:
            nonlocal cause
            if self._closed.is_set():
                raise failure
            if pause_s is not None:
                cause = self._waiting[threading.get_ident()] = str(failure)

        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, within_s=self._patience_s)
        try:
            return retry(call, UnavailableError, backoff, on_failure=on_failure, sleep=self._closed.wait)
        finally:
            self._waiting.pop(threading.get_ident(), None)
            if cause and self._on_wait is not None:
                self._on_wait(time.monotonic() - began, cause)
