"""Running tests in this process: their side effects, and those of a timeout."""

import sys
import time
from types import ModuleType

import pytest

from etude_quickstart import memory_running
from etude_quickstart.memory_running import run_here


class _Finder:
    def find_spec(self, *_: object) -> None:
        return None


def test_a_run_that_is_interrupted_while_imports_are_changed_leaves_them_as_they_were() -> None:
    modules, finders = dict(sys.modules), list(sys.meta_path)

    def runner() -> None:
        sys.modules["left_behind"] = ModuleType("left_behind")
        del sys.modules[__name__]
        sys.meta_path.insert(0, _Finder())
        while True:
            time.sleep(0.01)

    result, seconds = run_here(runner, 0.05)
    assert result is None and seconds >= 0.05
    assert sys.modules == modules and sys.meta_path == finders


def test_a_run_that_ends_in_time_gives_its_result() -> None:
    assert run_here(lambda: 3, 60.0)[0] == 3


def test_time_without_a_processor_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter([1.0])
    monkeypatch.setattr(memory_running, "_waited_s", lambda: next(waited, 50.0))
    assert run_here(lambda: time.sleep(0.1) or 3, 0.05)[0] == 3
