"""A Folder that retries while its store is unavailable.

Concurrent callers retry independently of each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from etude.kit.retry import Backoff, retry
from etude.weights.folders import ExistsError, Folder, UnavailableError

Answer = TypeVar("Answer")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


OnWait = Callable[[float, str], None]
"""Called after each call that was retried, successful or not: with its seconds, and the last cause."""


class PatientFolder:
    """Implements Folder: retries calls on UnavailableError for `patience_s`, then raises it."""

    def __init__(self, inner: Folder, patience_s: float, on_wait: OnWait | None = None) -> None:
        """`on_wait`: called in the thread that has waited."""
        self._inner = inner
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._closed = threading.Event()
        self._waiting: dict[int, str] = {}
        """Cause of the current retries, by thread."""

    @property
    def trouble(self) -> str:
        """Cause of a call that is being retried now; empty without any. Callable from any thread."""
        return next(iter(list(self._waiting.values())), "")

    def close(self) -> None:
        """Ends all retries: from now on UnavailableError is raised at once."""
        self._closed.set()

    @property
    def url(self) -> str:
        return self._inner.url

    def list(self, prefix: str) -> list[str]:
        return self._retry(lambda: self._inner.list(prefix))

    def read(self, name: str) -> bytes:
        return self._retry(lambda: self._inner.read(name))

    def write(self, name: str, data: bytes) -> None:
        self._retry(lambda: self._inner.write(name, data))

    def create(self, name: str, data: bytes) -> None:
        """See Folder.create. An existing file with the same bytes is taken for our own, whose response was
        lost: callers must make the bytes unique."""
        try:
            self._retry(lambda: self._inner.create(name, data))
        except ExistsError:
            if self.read(name) != data:
                raise

    def delete(self, name: str) -> None:
        self._retry(lambda: self._inner.delete(name))

    def sweep(self, prefix: str) -> None:
        self._retry(lambda: self._inner.sweep(prefix))

    def _retry(self, call: Callable[[], Answer]) -> Answer:
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
