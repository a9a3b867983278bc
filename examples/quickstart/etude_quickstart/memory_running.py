"""Runs tests in this process, with a timeout and without output."""

from __future__ import annotations

import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from etude.sandbox.inside import testrunner
from etude.sandbox.inside.processes import MOST_WAITING_S

Run = TypeVar("Run")

_SCHEDULED = Path("/proc/thread-self/schedstat")


def run_here(runner: Callable[[], Run], timeout_s: float) -> tuple[Run | None, float]:
    """(the runner's result, or None after a timeout; seconds).

    The timeout is an interval timer, which needs the main thread; in other threads nothing interrupts a run.
    """
    start_s = time.perf_counter()
    modules, finders = dict(sys.modules), list(sys.meta_path)
    result: Run | None = None
    try:
        with _quiet(), _alarm(timeout_s):
            result = runner()
    except testrunner.TimeUp:
        result = None
        _put_back(modules, finders)
    return result, time.perf_counter() - start_s


def _put_back(modules: dict[str, ModuleType], finders: list[Any]) -> None:
    """Reverts a run's changes to imports: the alarm may interrupt the runner's own cleanup."""
    sys.meta_path[:] = finders
    for name in sys.modules.keys() - modules.keys():
        if name.partition(".")[0] not in sys.stdlib_module_names:
            del sys.modules[name]
    sys.modules.update(modules)


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raises `testrunner.TimeUp` in the block after `timeout_s`, if in the main thread.

    As in other sandboxes, up to a minute of waiting for a processor does not count.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    began_s, waited_s = time.perf_counter(), _waited_s()

    def ring(signum: int, frame: Any) -> None:
        more_s = min(_waited_s() - waited_s, MOST_WAITING_S)
        left_s = timeout_s + more_s - (time.perf_counter() - began_s)
        if left_s <= 0:
            raise testrunner.TimeUp
        signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.001))

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _waited_s() -> float:
    """Seconds for which this thread has waited for a processor; 0 if the system does not report it."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@contextmanager
def _quiet() -> Iterator[None]:
    """Discards the output of tests and disables writing bytecode."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.dont_write_bytecode = before
