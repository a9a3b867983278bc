"""Stopping between two steps: Ctrl-C, SIGTERM and the wall-clock limit."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from etude.observe import Observer


class StopSignal:
    """Set by the first SIGINT or SIGTERM, or when the time is up; checked between two steps.

    A step is never interrupted, so what is saved after it is consistent. A second SIGINT raises
    KeyboardInterrupt at once. Outside the main thread only the time limit applies.
    """

    def __init__(self, observer: Observer, max_wall_s: float = 0.0, already_s: float = 0.0) -> None:
        """`max_wall_s`: limit of this process; 0: none. `already_s`: wall time of earlier processes."""
        self._observer = observer
        self._max_wall_s = max_wall_s
        self._already_s = already_s
        self._began = time.monotonic()
        self._signalled = self._is_preparing = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Within the block no step is under way: the first signal already raises KeyboardInterrupt."""
        self._is_preparing = True
        try:
            yield
        finally:
            self._is_preparing = False

    @property
    def elapsed_s(self) -> float:
        """Wall time of the run, earlier processes included."""
        return self._already_s + time.monotonic() - self._began

    def __bool__(self) -> bool:
        """Whether a signal came, or this process's time is used up: the run is saved as it is, unfinished."""
        is_late = bool(self._max_wall_s) and time.monotonic() - self._began >= self._max_wall_s
        return self._signalled or is_late

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled or self._is_preparing:
            raise KeyboardInterrupt
        self._signalled = True
        self._observer.say("stopping after this step; once more to stop at once")
