"""A run's time forecast, and the number of steps within a time limit, computed from given speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import EvaluationConfig, RunConfig
from etude.controller.forecast import (
    MIN_MIDTRAIN_SHARE,
    MIN_RL_SHARE,
    Forecast,
    Speeds,
    evaluation_sizes,
    plan_steps,
    with_validation,
)
from etude.errors import ConfigError
from etude.evaluation import ActingTasks

EVALUATIONS = 3
SPEEDS = Speeds(midtrain_step_s=0.5, rl_step_s=6.0, evaluation_s=20.0)


def config(limit_s: float, num_midtrain: int = 1000, num_rl: int = 50, **top: object) -> RunConfig:
    sections = {"midtrain": {"num_steps": num_midtrain}, "rl": {"num_steps": num_rl}}
    return RunConfig.model_validate({"max_wall_s": limit_s, **sections, **top})


def steps(planned: RunConfig) -> tuple[int, int]:
    return planned.midtrain.num_steps, planned.rl.num_steps


def test_the_first_word_names_the_whole_and_its_stages() -> None:
    assert (
        Forecast(20.0, 420.0, 300.0, 110.0).describe() == "about 14 min: mid-training 7, RL 5, evaluation 2"
    )
    assert Forecast(5.0, 0.0, 60.0, 30.0).describe() == "about 95 s: so far 5, RL 60, evaluation 30"
    assert (
        Forecast(240.0, 420.0, 360.0, 180.0).describe().startswith("about 20 min: so far 4, mid-training 7,")
    )
    assert Forecast(0.0, 7200.0, 1800.0, 0.0).describe() == "about 2.5 h: mid-training 2.0, RL 0.5"


def test_evaluations_are_forecast_by_the_sessions_that_are_played() -> None:
    settings = EvaluationConfig()
    before, family, *after = evaluation_sizes(settings, 240, has_other_families=True, acting=())
    assert (before, family) == (("before", (240 + 48 * 7 / 2) / 240), ("family before", 96 / 240))
    assert after == [("after", before[1]), ("family", family[1])]
    few = evaluation_sizes(settings, 8, has_other_families=False, acting=())
    assert few == [("before", (8 + 8 * 7 / 2) / 240), ("after", (8 + 8 * 7 / 2) / 240)]
    kind = ActingTasks("observed", mask=lambda task: task)
    observed = evaluation_sizes(settings, 8, has_other_families=False, acting=(kind,))[1]
    assert observed == ("observed before", 24 * (1 + 8 + 4) / 2 / 240)


def test_a_set_of_tasks_that_comes_to_its_end_before_the_steps_do_is_forecast_as_such() -> None:
    asked = config(0.0, num_rl=36, plan={"useful_share": 0.75}, rl={"num_steps": 36, "groups_per_step": 12})
    assert Forecast.of(asked, SPEEDS, 0.0, EVALUATIONS, num_groups=96).rl_s == 6 * SPEEDS.rl_step_s
    assert Forecast.of(asked, SPEEDS, 0.0, EVALUATIONS, num_groups=10_000).rl_s == 36 * SPEEDS.rl_step_s
    assert Forecast.of(asked, SPEEDS, 0.0, EVALUATIONS).rl_s == 36 * SPEEDS.rl_step_s


def test_looks_at_validation_tasks_are_forecast() -> None:
    looks = {"rl": {"num_steps": 50, "reward": {"price": {"validate_every": 10, "validation_tasks": 120}}}}
    asked = config(0.0, **looks)
    session_s = SPEEDS.evaluation_s / (2 * asked.evaluation.num_tasks)
    assert with_validation(SPEEDS, asked).rl_step_s == pytest.approx(SPEEDS.rl_step_s + 12 * session_s)
    looks["rl"]["max_staleness"] = 1
    assert with_validation(SPEEDS, config(0.0, **looks)) == SPEEDS


def test_a_plan_that_is_large_enough_keeps_all_steps_and_has_no_limit() -> None:
    planned = plan_steps(config(2000.0), SPEEDS, 30.0, EVALUATIONS)
    assert (steps(planned), planned.max_wall_s) == ((1000, 50), 0.0)


def test_a_shorter_time_gives_both_stages_fewer_steps_and_reinforcement_its_share() -> None:
    planned = plan_steps(config(700.0), SPEEDS, 30.0, EVALUATIONS)
    assert steps(planned) == (660, 46), "280 s of RL, 330 s of mid-training, 60 s of evaluation, 30 s gone"
    few = plan_steps(config(500.0, num_rl=4), SPEEDS, 30.0, EVALUATIONS)
    assert steps(few) == (772, 4), "RL that needs less leaves the rest"


def test_a_run_from_a_checkpoint_plans_reinforcement_alone() -> None:
    planned = plan_steps(config(150.0, initial_checkpoint="model"), SPEEDS, 30.0, EVALUATIONS)
    assert steps(planned) == (1000, 10)
    with pytest.raises(ConfigError, match="97 s"):
        plan_steps(config(95.0, initial_checkpoint="model"), SPEEDS, 30.0, EVALUATIONS)


def test_a_time_too_short_for_anything_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_steps(config(300.0), SPEEDS, 30.0, EVALUATIONS)
    error = caught.value
    assert (error.field, error.received) == ("max_wall_s", 300.0)
    assert error.fix == "set it to 485 or more, or to 0 for all steps"
    assert "about 15 min: mid-training 8, RL 5, evaluation 1" in str(error)


@given(
    num_midtrain=st.integers(0, 3000),
    num_rl=st.integers(0, 200),
    step_s=st.floats(0.001, 5),
    rl_step_s=st.floats(0.01, 100),
    evaluation_s=st.floats(0, 300),
    begun_s=st.floats(0, 100),
    limit_s=st.floats(1, 20_000),
)
def test_every_plan_keeps_its_time_and_a_refusal_names_a_time_that_is_enough(
    num_midtrain: int,
    num_rl: int,
    step_s: float,
    rl_step_s: float,
    evaluation_s: float,
    begun_s: float,
    limit_s: float,
) -> None:
    speeds, asked = Speeds(step_s, rl_step_s, evaluation_s), config(limit_s, num_midtrain, num_rl)
    try:
        planned = plan_steps(asked, speeds, begun_s, EVALUATIONS)
    except ConfigError as error:
        assert error.fix is not None
        enough_s = float(error.fix.split()[3])
        assert enough_s > limit_s
        planned = plan_steps(config(enough_s, num_midtrain, num_rl), speeds, begun_s, EVALUATIONS)
        limit_s = enough_s
    found = Forecast.of(planned, speeds, begun_s, EVALUATIONS)
    assert found.total_s <= limit_s + 1e-3
    midtrained, learned = steps(planned)
    assert MIN_MIDTRAIN_SHARE * num_midtrain <= midtrained <= num_midtrain
    assert min(num_rl, 1) <= learned <= num_rl
    if midtrained < num_midtrain and learned < num_rl:
        assert found.rl_s > MIN_RL_SHARE * limit_s - rl_step_s - 1e-6
