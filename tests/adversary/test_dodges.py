"""No act makes an agent's failure count as the infrastructure's, or costs a solved task its reward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.config import RewardConfig
from etude.records import ToolCall
from etude.sandbox.local.doctor import find_problems
from tests.adversary.acts import ACTS, BREAKING, GRADED
from tests.adversary.acts_files import FILES
from tests.adversary.acts_tools import BY_TOOLS
from tests.adversary.playing import RESOURCES, SOLVE, play, python

pytestmark = pytest.mark.skipif(bool(find_problems()), reason="; ".join(find_problems()) or "local works")

LOOK_AROUND = (
    ToolCall("glob", {"pattern": "**/*"}),
    ToolCall("list_dir", {}),
    ToolCall("grep", {"pattern": "x"}),
    ToolCall("read_file", {"path": "lib/tally.py"}),
    ToolCall("read_lints", {}),
    ToolCall("run_tests", {}),
)
"""What an agent does after an act with the other tools."""
REVIEWED = RewardConfig(lint_penalty=0.001, style_penalty=0.001)
ROOMY = replace(RESOURCES, disk_bytes=256 << 20, memory_bytes=512 << 20)


HEAVY = {
    "a command beyond its time",
    "a file of 20 MB of noise",
    "a source that no parser survives",
    "a sparse file as large as any may be",
    "eight lines of control characters, 6 MB each way",
    "long names of control characters",
    "output without an end",
    "ten thousand files",
}
"""Acts that take many seconds each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in ACTS]
)
def test_an_act_neither_voids_a_failure_nor_costs_a_success(name: str) -> None:
    act = python(ACTS[name])
    failed, solved = play([act, *LOOK_AROUND], [*SOLVE, act], reward=REVIEWED)
    assert failed.voided is None
    assert not failed.passed
    assert solved.voided is None
    assert solved.passed, solved.cause


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TOOLS)
def test_an_act_by_tools_neither_voids_a_failure_nor_costs_a_success(name: str) -> None:
    turns = BY_TOOLS[name]
    failed, solved = play([*turns, *LOOK_AROUND], [*SOLVE, *turns], reward=REVIEWED)
    assert failed.voided is None
    assert not failed.passed
    assert solved.voided is None
    assert solved.passed, solved.cause


ASLEEP = [
    pytest.param(name, marks=() if name in FILES and name not in HEAVY else pytest.mark.repeated)
    for name in ACTS
]
"""A sleep keeps files alone: what acts leave of processes is gone after any."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ASLEEP)
def test_an_act_before_a_sleep_neither_voids_a_failure_nor_costs_a_success(name: str) -> None:
    act = python(ACTS[name])
    failed, solved = play([act], [*SOLVE, act], sleeps=True)
    assert failed.voided is None
    assert not failed.passed
    assert solved.voided is None
    assert solved.passed, solved.cause


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKING)
def test_what_goes_beyond_a_limit_is_a_failure_of_the_agent(name: str) -> None:
    act, cause = BREAKING[name]
    for ended in play(
        [python(act)], [*SOLVE, python(act)], [python(act), *LOOK_AROUND], resources=ROOMY, reward=REVIEWED
    ):
        assert ended.voided is None
        assert not ended.passed
        assert cause in f"{ended.cause} {ended.raised}"


@pytest.mark.parametrize("name", GRADED)
def test_what_waits_for_the_grading_is_a_verdict(name: str) -> None:
    write = ToolCall("write_file", {"path": "lib/tally.py", "text": GRADED[name]})
    (ended,) = play([write], reward=REVIEWED)
    assert ended.voided is None
    assert not ended.passed
