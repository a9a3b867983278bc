import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import MonitorConfig
from etude.observe import MemorySink, MonitoredSink, RecordingObserver
from etude.observe.drift import WATCHED, DriftMonitor

CONFIG = MonitorConfig(baseline_steps=10, recent_steps=3)


def wobble(step: int, mean: float) -> float:
    return mean * (1 + 0.05 * math.sin(step))


def feed(monitor: DriftMonitor, name: str, means: list[float], first: int = 1) -> list[tuple[str, int]]:
    """(figure, step) of each alarm."""
    found = []
    for step, mean in enumerate(means, first):
        found += [(alarm.name, alarm.step) for alarm in monitor.observe(step, {name: wobble(step, mean)})]
    return found


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("malformed", 0.1, 0.4),
        ("open_todos", 0.0, 1.0),
        ("reads_before_edits", 0.9, 0.3),
        ("comment_share", 0.1, 0.4),
        ("comment_share", 0.4, 0.1),
        ("questions", 0.2, 1.0),
        ("terminal_share", 0.3, 0.9),
        ("calls_per_turn", 1.2, 3.0),
        ("edits_per_turn", 0.3, 0.05),
        ("parallel_share", 0.5, 0.1),
    ],
)
def test_a_figure_that_leaves_where_it_was_raises_one_alarm(name: str, before: float, after: float) -> None:
    alarms = feed(DriftMonitor(CONFIG), name, [before] * 15 + [after] * 5)
    assert [alarm for alarm, _ in alarms] == [name]
    assert 16 <= alarms[0][1] <= 18


@pytest.mark.parametrize(("name", "before", "after"), [("malformed", 0.4, 0.1), ("parallel_share", 0.1, 0.5)])
def test_a_change_for_the_better_raises_none(name: str, before: float, after: float) -> None:
    assert feed(DriftMonitor(CONFIG), name, [before] * 15 + [after] * 10) == []


@given(st.sampled_from(sorted(WATCHED)), st.floats(0.01, 100), st.integers(0, 1000))
def test_what_stays_where_it_is_raises_none(name: str, mean: float, first: int) -> None:
    assert feed(DriftMonitor(CONFIG), name, [mean] * 40, first) == []


def test_nothing_is_judged_before_there_is_a_baseline() -> None:
    assert feed(DriftMonitor(CONFIG), "malformed", [0.1] * 6 + [5.0] * 3) == []


def test_an_alarm_comes_again_only_after_it_has_passed() -> None:
    means = [0.1] * 12 + [1.0] * 20 + [1.0] * 5 + [6.0] * 5
    assert [name for name, _ in feed(DriftMonitor(CONFIG), "malformed", means)] == ["malformed"] * 2


def test_a_bound_holds_from_the_first_steps_on_and_for_any_figure() -> None:
    monitor = DriftMonitor(CONFIG.model_copy(update={"bounds": {"reward": (0.2, 1.0)}}))
    assert feed(monitor, "reward", [0.5, 0.5, 0.5, 0.0, 0.0, 0.0]) == [("reward", 5)]


def test_figures_that_are_missing_or_no_numbers_are_left_out() -> None:
    monitor = DriftMonitor(CONFIG)
    for step in range(30):
        assert monitor.observe(step, {"malformed": math.nan, "name": "x"}) == []


def test_alarms_are_rows_and_lines_and_the_rows_themselves_pass_unchanged() -> None:
    sink, observer = MemorySink(), RecordingObserver()
    monitored = MonitoredSink(sink, CONFIG, observer)
    monitored.write("evaluation", 3, {"malformed": 9.0})
    for step in range(1, 20):
        monitored.write("rl", step, {"malformed": wobble(step, 0.1 if step < 15 else 2.0)})
    assert [row["step"] for row in sink.rows if row["kind"] == "rl"] == list(range(1, 20))
    (alarm,) = [row for row in sink.rows if row["kind"] == "alarm"]
    assert alarm["name"] == "malformed" and alarm["recent"] > alarm["baseline"]
    assert [line for line in observer.lines if "malformed" in line and line.startswith("alarm: step ")]


def test_a_resumed_run_goes_on_with_the_baseline_of_the_sitting_before() -> None:
    before = MemorySink()
    for step in range(1, 15):
        before.write("rl", step, {"malformed": wobble(step, 0.1)})
    sink = MemorySink()
    monitored = MonitoredSink(sink, CONFIG, RecordingObserver(), before.rows)
    for step in range(12, 18):  # the steps since the checkpoint come again
        monitored.write("rl", step, {"malformed": wobble(step, 2.0)})
    assert [row["name"] for row in sink.rows if row["kind"] == "alarm"] == ["malformed"]


def test_switched_off_it_only_passes_rows_on() -> None:
    sink = MemorySink()
    monitored = MonitoredSink(sink, MonitorConfig(enabled=False), RecordingObserver())
    for step in range(60):
        monitored.write("rl", step, {"malformed": float(step > 40) * 9})
    assert {row["kind"] for row in sink.rows} == {"rl"}
