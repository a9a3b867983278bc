"""Writes the measured difficulty of tasks, from a model's pass rate, into their `task.toml`.

[metadata]
difficulty = "medium"                       by the pass rate; unchanged if no session passed
calibration = "3 of 8 sessions pass"        or "not calibrated"
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from etude.errors import TaskError
from etude.kit.durable import write_text
from etude.kit.toml import toml_text
from etude.tasks.making.changes import Difficulty
from etude.tasks.making.selection import NOT_CALIBRATED

_EASY, _MEDIUM = 2 / 3, 1 / 3
_TABLE = "[metadata]"


def calibrate(directory: Path, num_passed: int, num_sessions: int) -> None:
    """Writes a model's pass rate into a Harbor task directory.

    Raises TaskError if the metadata table of its task.toml cannot be edited; OSError.
    """
    path = directory / "task.toml"
    facts = {"calibration": NOT_CALIBRATED}
    if num_passed:
        facts = {
            "difficulty": find_difficulty(num_passed / num_sessions),
            "calibration": f"{num_passed} of {num_sessions} sessions pass",
        }
    before = path.read_text(encoding="utf-8")
    after = _with_metadata(before, facts)
    wanted = tomllib.loads(before)
    wanted["metadata"] = {**wanted.get("metadata", {}), **facts}
    try:
        is_right = tomllib.loads(after) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise TaskError(
            "its metadata cannot be edited", field="task.toml: metadata", received=str(path),
            fix=f"write them as a table {_TABLE}, with difficulty and calibration on a line each",
        )  # fmt: skip
    write_text(path, after)


def find_difficulty(pass_rate: float) -> Difficulty:
    """The difficulty of a task with this pass rate."""
    return "easy" if pass_rate >= _EASY else "medium" if pass_rate >= _MEDIUM else "hard"


def _with_metadata(text: str, facts: dict[str, str]) -> str:
    lines = text.rstrip("\n").split("\n")
    if _TABLE not in lines:
        lines += ["", _TABLE]
    first = lines.index(_TABLE) + 1
    last = next((at for at in range(first, len(lines)) if lines[at].startswith("[")), len(lines))
    names = re.compile(rf"\s*({'|'.join(facts)})\s*=")
    kept = [line for line in lines[first:last] if not names.match(line)]
    written = toml_text(facts).splitlines()
    return "\n".join([*lines[:first], *written, *kept, *lines[last:]]) + "\n"
