import io
from collections.abc import Iterable

import pytest
from rich.console import Console

from etude.cli.progress import PlainObserver, RichObserver, describe_values, rate_text
from etude.cli.time_left import TimeLeft


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plain(every_s: float = 10) -> tuple[PlainObserver, io.StringIO, Clock]:
    output, clock = io.StringIO(), Clock()
    return PlainObserver(Console(file=output, width=200), every_s=every_s, clock=clock), output, clock


def advance(observer: PlainObserver, clock: Clock, steps: Iterable[int], step_s: float) -> None:
    for step in steps:
        clock.now_s += step_s
        observer.stage_advances(step, {"reward": 0.25, "pass_rate": 0.5, "entropy": 1.0})


def test_plain_progress_is_a_line_now_and_then() -> None:
    observer, output, clock = plain()
    observer.stage_begins("rl", 100)
    advance(observer, clock, range(1, 41), 0.5)
    observer.stage_ends()
    assert output.getvalue().splitlines() == [
        "rl: 100 steps",
        "rl 20/100  2.0 steps/s  reward 0.25  pass 50%  40 s left",
        "rl 40/100  2.0 steps/s  reward 0.25  pass 50%  30 s left",
        "rl: 40 steps in 20.0 s  reward 0.25  pass 50%",
    ]


def test_what_is_counted_has_its_name() -> None:
    observer, output, clock = plain()
    observer.stage_begins("evaluation", 60, unit="session")
    advance(observer, clock, range(1, 31), 0.5)
    advance(observer, clock, [31], 40.0)
    observer.stage_ends()
    text = output.getvalue()
    assert text.startswith("evaluation: 60 sessions\nevaluation 20/60  2.0 sessions/s")
    assert "s/session" in text and "31 sessions in" in text and "step" not in text


def test_a_stage_without_steps_says_only_what_it_took() -> None:
    observer, output, clock = plain()
    observer.stage_begins("image", 0, unit="run")
    clock.now_s += 55.6
    observer.stage_ends()
    assert output.getvalue().splitlines() == ["image", "image: 55.6 s"]


def test_a_resumed_stage_and_a_slow_beginning_do_not_distort_the_first_line() -> None:
    observer, output, clock = plain()
    observer.stage_begins("rl", 1000)
    clock.now_s += 8  # what the first steps take besides
    advance(observer, clock, range(510, 550, 10), 1.0)
    assert "rl 520/1000  10.0 steps/s  reward 0.25  pass 50%  48 s left" in output.getvalue()


def test_the_time_left_follows_a_machine_that_becomes_slower() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect_stages([("mid", 100.0), ("before", 10.0), ("rl", 90.0), ("after", 10.0)])
    left.begin("mid", 100)
    assert left.words() == "2 min left, 4 min of the run"

    def take(steps: Iterable[int], step_s: float) -> None:
        for step in steps:
            clock.now_s += step_s
            left.advance(step)

    take(range(1, 51), 1.0)
    assert left.words() == "50 s left, 3 min of the run"
    take(range(51, 61), 10.0)
    assert left.words() == "7 min left, 20 min of the run"
    left.begin("before", 1)
    assert left.words() == "74 s left, 14 min of the run"


def test_a_short_stage_that_starts_slowly_hardly_changes_the_time_left_of_the_run() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect_stages([("before", 20.0), ("rl", 600.0)])
    left.begin("before", 100)
    for step in (1, 2):
        clock.now_s += 2.0  # ten times the forecast
        left.advance(step)
    assert left.words() == "3 min left, 19 min of the run"


def test_a_stage_of_unknown_length_has_no_time_left() -> None:
    observer, output, clock = plain(every_s=0)
    observer.stage_begins("tokenizer", 0)
    advance(observer, clock, [1, 2], 4.0)
    assert output.getvalue().splitlines()[-1] == "tokenizer 2/?  4.0 s/step  reward 0.25  pass 50%"


def test_text_in_brackets_is_no_markup() -> None:
    output = io.StringIO()
    PlainObserver(Console(file=output)).say("[red]as it is[/red]")
    assert output.getvalue() == "[red]as it is[/red]\n"


def draw(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    output = io.StringIO()
    observer = RichObserver(Console(file=output, force_terminal=True, width=120))
    observer.stage_begins("rl", 10)
    observer.stage_advances(4, {"reward": 0.25, "pass_rate": 0.5})
    observer.say("a line")
    observer.stage_ends()
    observer.stage_ends()
    return output.getvalue()


def test_a_terminal_gets_a_bar_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = draw(monkeypatch, TERM="xterm-256color")
    assert "4/10" in text
    assert "reward 0.25  pass 50%" in text
    assert "a line" in text
    assert "\x1b[38" in text or "\x1b[3" in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    text = draw(monkeypatch, NO_COLOR="1", TERM="xterm-256color")
    assert "4/10" in text
    assert "\x1b[38" not in text
    assert "\x1b[32m" not in text


def test_only_figures_worth_watching_are_shown() -> None:
    assert (
        describe_values({"tokens_per_s": 9123.4, "agent_loss": 0.4567, "step": 3})
        == "loss 0.457  9,123 tokens/s"
    )
    assert (rate_text(0), rate_text(2.5), rate_text(0.25)) == ("", "2.5 steps/s", "4.0 s/step")
