"""Tests that run in this very process, with a timeout and without a word."""

from __future__ import annotations

import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import ModuleType
from typing import Any, TypeVar

from etude.sandbox.inside import testrunner

Run = TypeVar("Run")


def run_here(runner: Callable[[], Run], timeout_s: float) -> tuple[Run | None, float]:
    """The runner's result, or None at the timeout; and the seconds taken.

    The timeout needs the main thread (it is an interval timer); elsewhere nothing interrupts a run.
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
    """Undoes what a run did to imports: the alarm may ring while the runner itself tidies up."""
    sys.meta_path[:] = finders
    for name in sys.modules.keys() - modules.keys():
        if name.partition(".")[0] not in sys.stdlib_module_names:
            del sys.modules[name]
    sys.modules.update(modules)


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raises `testrunner.TimeUp` in the block after `timeout_s`, where signals can reach it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: Any) -> None:
        raise testrunner.TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """What tests print goes nowhere, and bytecode is never written."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.dont_write_bytecode = before
