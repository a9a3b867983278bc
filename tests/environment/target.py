"""A small task whose hidden tests compare outside of the sandbox."""

from __future__ import annotations

from etude.records import Task

_VISIBLE = """from lib.tally import tally


def test_tally():
    assert tally([4]) == 4
"""
_HIDDEN = """from lib.tally import tally


def test_tally():
    assert tally([1, 2, 3]) == 6
    assert tally([5]) == 5


def test_empty():
    assert tally([]) == 0
"""

TARGET = Task(
    id="target/tally",
    instruction="test_tally fails",
    files={
        "lib/tally.py": 'def tally(xs):\n    """The sum of xs."""\n    return sum(xs) - 1\n',
        "tests/test_all.py": _VISIBLE,
    },
    hidden_files={"tests/test_hidden.py": _HIDDEN},
    solution_files={"lib/tally.py": 'def tally(xs):\n    """The sum of xs."""\n    return sum(xs)\n'},
    test_paths=("tests/test_all.py",),
    hidden_test_paths=("tests/test_hidden.py",),
)
"""`tally` is off by one."""
