from etude.controller.utilisation import Utilisation


class Clock:
    """Implements a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_seconds_are_told_by_state_since_the_last_look() -> None:
    clock, parts = Clock(), {"engine_step_s": 5.0}
    utilisation = Utilisation(clock, lambda: parts)
    for state, seconds in (("wait", 3.0), ("train", 1.0), ("publish", 0.5)):
        utilisation.enter(state)
        clock.now_s += seconds
    parts["engine_step_s"] = 7.0
    assert utilisation.pop_seconds() == {
        "trainer_wait_s": 3.0, "trainer_train_s": 1.0, "trainer_publish_s": 0.5, "engine_step_s": 2.0
    }  # fmt: skip
    clock.now_s += 0.5
    parts["engine_step_s"] = 7.25
    assert utilisation.pop_seconds() == {
        "trainer_wait_s": 0.0, "trainer_train_s": 0.0, "trainer_publish_s": 0.5, "engine_step_s": 0.25
    }  # fmt: skip
    assert utilisation.total == {"wait": 3.0, "train": 1.0, "publish": 1.0}
    assert utilisation.busy_share == 0.4


def test_before_anything_has_happened_nobody_was_busy() -> None:
    assert Utilisation(Clock(), dict).busy_share == 0.0
    assert Utilisation(Clock(), dict).pop_seconds() == {}
