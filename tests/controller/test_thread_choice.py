"""A stage's first steps decide how many threads it runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from etude.config import RunConfig
from etude.controller.thread_choice import ThreadChoice
from tests.model.builders import small_model

MODEL = small_model()


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock that steps of 100 tokens move on."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.used: list[int] = []

    def step(self, tokens: float = 100.0) -> dict[str, float]:
        self.used.append(torch.get_num_threads())
        self.now += self.seconds[self.used[-1]] * tokens / 100
        return {"tokens": tokens}


def choose(machine: Machine, steps: int, lines: list[str] | None = None) -> ThreadChoice:
    say = (lambda _: None) if lines is None else lines.append
    choice = ThreadChoice(RunConfig(device="cpu"), MODEL, "stage", say, lambda: machine.now)
    for _ in range(steps):
        choice.step(machine.step)
    return choice


@pytest.mark.parametrize("fastest", [1, 2])
def test_the_fastest_number_is_taken_after_five_turns_of_each(fastest: int) -> None:
    machine, lines = Machine({fastest: 1.0, 3 - fastest: 1.3}), []
    choice = choose(machine, 14, lines)
    assert choice.chosen == fastest
    assert machine.used == [1, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, *[fastest] * 3]
    assert len(lines) == 1 and f"{fastest} of 2 threads" in lines[0]
    assert torch.get_num_threads() == 2, "what was set is set again"


def test_a_machine_that_becomes_ten_times_slower_meanwhile_is_judged_by_medians() -> None:
    machine = Machine({1: 1.0, 2: 0.6})
    choice = choose(machine, 8)
    machine.seconds = {1: 10.0, 2: 6.0}
    for _ in range(3):
        choice.step(machine.step)
    assert choice.chosen == 2


def test_what_is_said_is_what_decided() -> None:
    """The ratio within a round. Medians over all rounds say that one thread is four times as fast."""
    machine, lines = Machine({1: 1.0}), list[str]()
    choice = choose(machine, 1, lines)
    for one, two in ((1.0, 0.8), (1.0, 0.8), (1.0, 5.0), (5.0, 4.0), (5.0, 4.0)):
        machine.seconds = {1: one, 2: two}
        choice.step(machine.step)
        choice.step(machine.step)
    assert choice.chosen == 2
    assert lines == [
        "stage: 2 of 2 threads (relative speed: 1.00 on 1, 1.25 on 2; within 5% the most threads are taken)"
    ]


def test_a_machine_that_others_leave_in_mid_run_is_measured_again() -> None:
    machine, lines = Machine({1: 1.0, 2: 1.3}), []
    choice = choose(machine, 11 + 200, lines)
    assert choice.chosen == 1
    machine.seconds = {1: 0.1, 2: 0.06}
    for _ in range(11):
        choice.step(machine.step)
    assert choice.chosen == 2 and machine.used[-1] == 2
    for _ in range(400):
        choice.step(machine.step)
    assert len(lines) == 2, "a choice that stays is not repeated"
    assert machine.used.count(1) < 11 + 200 + 20


def test_of_numbers_that_are_alike_the_larger_is_taken() -> None:
    assert choose(Machine({1: 1.0, 2: 1.02}), 11).chosen == 2
    assert choose(Machine({1: 1.0, 2: 1.08}), 11).chosen == 1


def test_steps_of_any_length_are_compared_by_the_token() -> None:
    machine = Machine({1: 1.0, 2: 1.2})
    choice = ThreadChoice(RunConfig(device="cpu"), MODEL, "stage", clock=lambda: machine.now)
    choice.step(machine.step)
    for turn in range(10):
        choice.step(lambda turn=turn: machine.step(300.0 if turn % 2 == 0 else 100.0))
    assert choice.chosen == 1


def test_a_step_that_trained_on_nothing_is_no_measurement() -> None:
    machine = Machine({1: 1.0, 2: 0.6})
    choice = choose(machine, 10)
    choice.step(lambda: {"train_tokens": 0.0})
    assert not choice.chosen
    choice.step(machine.step)
    assert choice.chosen == 2


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (RunConfig(device="cpu", num_threads=2), MODEL),
        (RunConfig.model_validate({"device": "cpu", "parallel": {"ranks": 2}}), MODEL),
        (RunConfig(device="cuda"), MODEL),
        (RunConfig(device="cpu"), nn.Linear(1, 1)),
    ],
)
def test_what_is_configured_or_not_shared_by_threads_is_not_measured(
    config: RunConfig, model: nn.Module
) -> None:
    choice, machine = ThreadChoice(config, model, "stage"), Machine({2: 1.0})
    choice.step(machine.step)
    assert choice.chosen == 2 and machine.used == [2]


def test_one_core_measures_nothing() -> None:
    torch.set_num_threads(1)
    machine = Machine({1: 1.0})
    assert choose(machine, 2).chosen == 1
