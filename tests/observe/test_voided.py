"""Voided sessions: their shares by cause, and the alarm where agents gain by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.config import MonitorConfig
from etude.observe import MemorySink, MonitoredSink, RecordingObserver
from etude.observe.voided import cause_of, compare_voided_shares, shares_by_cause, summarize_voided
from etude.records import Status, Trajectory, TrajectoryId


def session(
    green: bool, voided: bool = False, num_turns: int = 3, cause: str = "SandboxError: x"
) -> Trajectory:
    status = Status.INFRASTRUCTURE if voided else Status.DONE
    facts = {"num_turns": num_turns, "last_tests_green": green}
    return Trajectory(
        TrajectoryId("run", "task", 0, 0, 0), (), (), status, cause if voided else "", facts=facts
    )


def counts(red: int, red_voided: int, green: int, green_voided: int) -> dict[str, float]:
    return {
        "red_sessions": red, "red_voided": red_voided, "green_sessions": green, "green_voided": green_voided,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("SandboxLostError: sandbox: died", "SandboxLostError"),
        ("SandboxError: the ValueError inside", "SandboxError"),
        ("idle", "other"),
        ("", "other"),
        ("the cluster is gone: SandboxError", "other"),
    ],
)
def test_a_cause_is_the_class_that_it_names_first(text: str, cause: str) -> None:
    assert cause_of(text) == cause


def test_a_steps_figures_say_how_many_were_voided_by_what_and_in_which_state() -> None:
    sessions = [
        session(green=True),
        replace(session(green=False), attempt=1),
        session(green=False, voided=True),
        session(green=False, voided=True, num_turns=0, cause="SamplerError: gone"),
    ]
    assert shares_by_cause(sessions) == {"SamplerError": 0.25, "SandboxError": 0.25}
    assert summarize_voided(sessions) == {
        "voided_share": 0.5,
        "retried_share": 0.5,
        "voided_SamplerError": 0.25,
        "voided_SandboxError": 0.25,
        **counts(2, 1, 1, 0),
    }
    assert summarize_voided([]) == {}


@pytest.mark.parametrize(
    ("row", "alarms"),
    [
        (counts(200, 40, 200, 0), True),
        (counts(200, 40, 200, 4), True),
        (counts(200, 40, 200, 38), False),
        (counts(200, 0, 200, 40), False),
        (counts(200, 4, 200, 0), False),
        (counts(200, 200, 0, 0), False),
        (counts(10, 5, 10, 4), False),
        ({}, False),
    ],
)
def test_only_failing_sessions_that_are_voided_more_often_are_unlike(
    row: dict[str, float], alarms: bool
) -> None:
    assert (compare_voided_shares([row]) is not None) == alarms
    assert (
        compare_voided_shares([{name: value / 4 for name, value in row.items()}] * 4) is not None
    ) == alarms


def test_a_run_in_which_failures_are_voided_raises_an_alarm_and_an_honest_one_none() -> None:
    for red_voided, green_voided, expected in ((4, 0, 1), (2, 2, 0)):
        sink, observer = MemorySink(), RecordingObserver()
        monitored = MonitoredSink(sink, MonitorConfig(), observer)
        for step in range(1, 15):
            monitored.write("rl", step, counts(20, red_voided, 20, green_voided))
        alarms = [row for row in sink.rows if row["kind"] == "alarm"]
        assert len(alarms) == expected
        if expected:
            assert alarms[0]["name"] == "voided_share"
            assert (alarms[0]["recent"], alarms[0]["baseline"]) == (0.2, 0.0)
            assert any("visible tests fail" in line for line in observer.lines)
