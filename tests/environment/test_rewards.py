import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.advantages import member_value
from etude.config import LengthConfig, RewardConfig, load_config
from etude.environment.grading import Verdict
from etude.environment.rewards import (
    Effort,
    Evidence,
    _split_message,
    check_reward,
    compute_reward,
    concave_price,
    count_foreign_lines,
    measure_effort,
    with_length,
)
from etude.errors import ConfigError
from etude.records import RewardBreakdown, Status, Task, ToolCall
from tests.environment.playing import (
    FAILS,
    FINISH,
    MEND,
    READ,
    SOLVES,
    TASK,
    TEST,
    new_environment,
    renderer,
    run_episode,
    scripted,
)

PASSED = Verdict(True, 4, 0, None, 0.0)
FAILED = Verdict(False, 3, 1, "test_x: no", 0.0)


def evidence(verdict=PASSED, status=Status.DONE, **facts) -> Evidence:
    return Evidence(TASK, status, verdict, facts)


def twice_the_edits(seen: Evidence) -> float:
    """A term as a user writes it."""
    return 2.0 * seen.count("num_edits")


def no_number(seen: Evidence) -> float:
    return math.nan


def much(seen: Evidence) -> float:
    return 1e300


def beyond(seen: Evidence) -> int:
    return 10**5000


def failing(seen: Evidence) -> float:
    raise KeyError("boom")


def test_by_default_only_the_verdict_malformed_calls_and_limits_count() -> None:
    reward = compute_reward(
        evidence(malformed=1, open_todos=3, errors_by_class={"timeout": 2}), RewardConfig()
    )
    assert reward.task == 1.0
    assert reward.terms == {"malformed": -0.05, "limit": 0.0}
    limited = compute_reward(evidence(FAILED, Status.LIMIT, malformed=9), RewardConfig())
    assert (limited.task, limited.terms) == (0.0, {"malformed": -0.2, "limit": -0.1})


@pytest.mark.parametrize(
    ("settings", "facts", "verdict", "name", "value"),
    [
        ({"invalid_arguments_penalty": 0.25}, {"invalid_arguments": 2}, PASSED, "invalid_arguments", -0.5),
        ({"timeout_penalty": 0.125}, {"timeout": 9}, PASSED, "timeout", -0.5),
        (
            {"unexpected_environment_penalty": 0.25},
            {"unexpected_environment": 1, "provider": 7},
            PASSED,
            "unexpected_environment",
            -0.25,
        ),
        ({"lint_penalty": 0.25}, {}, replace(PASSED, lints=3), "lints", -0.75),
        ({"style_penalty": 0.125, "styles_at_most": 2}, {}, replace(PASSED, style=5), "style", -0.25),
    ],
)
def test_each_term_is_a_count_at_its_price_up_to_a_number(settings, facts, verdict, name, value) -> None:
    reward = compute_reward(evidence(verdict, errors_by_class=facts), RewardConfig(**settings))
    assert reward.terms == {"malformed": 0.0, "limit": 0.0, name: value}
    assert reward.total == 1.0 + value


def test_open_to_dos_are_penalised() -> None:
    reward = compute_reward(evidence(open_todos=2), RewardConfig(todo_penalty=0.125))
    assert reward.terms["todos"] == -0.25


def test_partial_credit_is_a_share_of_the_hidden_tests_and_success_stays_whole() -> None:
    config = RewardConfig(partial_weight=0.5)
    assert compute_reward(evidence(FAILED), config).task == 0.375
    assert compute_reward(evidence(PASSED), config).task == 1.0
    assert compute_reward(evidence(Verdict(False, 0, 0, "dead", 0.0)), config).task == 0.0
    for reward, earned in ((0.5, 0.25), (-3.0, 0.0)):
        script = Verdict(False, 0, 1, "tests/test.sh gave it", 0.0, reward=reward)
        assert compute_reward(evidence(script), config).task == earned


def test_a_term_of_ones_own_is_named_by_its_function() -> None:
    config = RewardConfig(custom={f"{__name__}:twice_the_edits": 0.5})
    check_reward(config)
    assert compute_reward(evidence(num_edits=3), config).terms[f"{__name__}:twice_the_edits"] == 3.0


def test_a_term_that_is_no_function_or_gives_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such function"):
        check_reward(RewardConfig(custom={"etude.nowhere:term": 1.0}))
    with pytest.raises(ConfigError, match="finite"):
        compute_reward(evidence(), RewardConfig(custom={f"{__name__}:no_number": 1.0}))
    with pytest.raises(ValueError, match=r"package\.module:function"):
        RewardConfig(custom={"term": 1.0})


@pytest.mark.parametrize(("name", "weight"), [("much", 1e300), ("beyond", 1.0)])
def test_a_reward_that_overflows_is_refused(name: str, weight: float) -> None:
    with pytest.raises(ConfigError, match="finite number"):
        compute_reward(evidence(), RewardConfig(custom={f"{__name__}:{name}": weight}))


def test_a_sum_or_a_length_that_overflows_is_refused() -> None:
    reward = RewardBreakdown(1.0, {"a": 1.7e308, "b": 1.7e308})
    assert not reward.is_finite
    length = LengthConfig(weight=1e308, turn=1e6, q=0.0)
    with pytest.raises(ConfigError, match="finite number"):
        with_length(RewardBreakdown(1.0), Effort(turns=10**6), length)


def test_a_term_that_raises_is_named_with_its_session_and_what_it_raised() -> None:
    name = f"{__name__}:failing"
    with pytest.raises(
        ConfigError, match=r"raised KeyError\('boom'\).*received 'a session of .*fix: "
    ) as caught:
        compute_reward(evidence(), RewardConfig(custom={name: 1.0}))
    assert caught.value.field == f"rl.reward.custom.{name}"


def test_a_term_whose_module_cannot_be_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_terms.py").write_text("def term(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: SyntaxError"):
        check_reward(RewardConfig(custom={"broken_terms:term": 1.0}))


# ---- length -------------------------------------------------------------------------------------


@given(st.floats(0, 1e4), st.floats(1e-3, 1e3), st.floats(0, 3))
def test_the_price_is_the_formula(x: float, k: float, q: float) -> None:
    if abs(1 - q) < 1e-6:
        expected = math.log1p(k * x) / k
    else:
        expected = ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    assert concave_price(x, k, q) == pytest.approx(expected, rel=1e-6, abs=1e-9 / k)


@given(st.floats(0, 100), st.floats(0.01, 10), st.floats(0, 3), st.floats(0.1, 10))
def test_the_price_rises_and_bends_down(x: float, k: float, q: float, more: float) -> None:
    low, middle, high = (concave_price(x + step * more, k, q) for step in range(3))
    assert 0 <= low < middle < high
    assert high - middle <= (middle - low) * (1 + 1e-9)
    assert concave_price(0.0, k, q) == 0.0


def test_the_price_is_smooth_where_the_formula_divides_by_nothing() -> None:
    beside = [concave_price(7.0, 2.0, 1.0 + step) for step in (-1e-13, 0.0, 1e-13)]
    assert beside[0] == pytest.approx(beside[1], rel=1e-12)
    assert beside[2] == pytest.approx(beside[1], rel=1e-12)


def test_calls_side_by_side_cost_less_than_one_after_the_other() -> None:
    def effort(turns) -> Effort:
        return measure_effort(run_episode(new_environment(), scripted(turns)), renderer())

    serial = effort(((READ,), (TEST,), (MEND,), (FINISH,)))
    parallel = effort(((READ, TEST), (MEND,), (FINISH,)))
    assert (serial.turns, serial.first_calls, serial.parallel_calls) == (4, 4, 0)
    assert (parallel.turns, parallel.first_calls, parallel.parallel_calls) == (3, 3, 1)
    calls_only = LengthConfig(thinking_token=0, call_token=0, message_token=0, output_token=0, turn=0)
    assert parallel.weighted(calls_only) == pytest.approx(serial.weighted(calls_only) * 3.25 / 4)


QUICKSTART = load_config(
    Path(__file__).parents[2] / "configs" / "quickstart.toml", ["rl.reward.length.weight=0.05"]
).rl.reward


def value_of(calls: list[int], verdict: float = 1.0) -> float:
    """What a session with so many calls in each turn is worth at the quickstart's price on turns."""
    first = sum(count > 0 for count in calls)
    effort = Effort(first_calls=first, parallel_calls=sum(calls) - first, turns=len(calls))
    reward = with_length(RewardBreakdown(verdict), effort, QUICKSTART.length)
    return member_value(reward, QUICKSTART.most_price, 1.0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
def test_a_turn_has_a_concave_price_among_successes_and_a_call_beside_another_saves_one(
    calls: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(calls) - 1))
    before, rest = calls[:at], calls[at + 1 :]
    solved = value_of(calls)
    assert value_of([*before, calls[at] + 1, *rest]) <= solved, "one more call in a turn"
    assert value_of([*before, 1, *calls[at:]]) < solved, "one more turn"
    if rest:
        assert value_of([*before, calls[at] + rest[0], *rest[1:]]) > solved, (
            "the next turn's calls in this one"
        )
    prices = [1.0 - value_of([1] * count) for count in (len(calls), len(calls) + 1, len(calls) + 2)]
    assert prices[2] - prices[1] < prices[1] - prices[0], "concave"
    assert value_of([4] * 1000) > value_of(calls[:at], 0.0) == value_of(calls, 0.0) == 0.0


def test_every_sampled_token_is_counted_once_and_every_later_given_one() -> None:
    trajectory = run_episode(new_environment(), scripted(SOLVES))
    effort = measure_effort(trajectory, renderer())
    sampled = effort.thinking_tokens + effort.call_tokens + effort.message_tokens
    assert sampled == trajectory.num_sampled_tokens
    (segment,) = trajectory.segments
    prompt = int(segment.sampled.argmax())
    assert effort.output_tokens == len(segment.tokens) - prompt - sampled
    assert effort.call_tokens > 0.9 * sampled


def test_words_and_calls_are_told_apart_token_by_token() -> None:
    words = renderer().message(["so it is\n"])
    call = renderer().message([READ])
    both = renderer().message(["so it is\n", READ])
    thinking, calls, text = _split_message(both.tolist(), renderer()).tolist()
    assert thinking == 0
    assert text in range(len(words) - 2, len(words) + 1)
    assert calls in range(len(call) - 2, len(call) + 1)


def test_reasoning_is_thinking() -> None:
    from etude.agent import core_registry
    from etude.tokens import ETUDE_TEMPLATE, Renderer, train_tokenizer
    from etude.tokens.grammar import XmlGrammar
    from etude.tokens.grammar.channels import THINK_MARKS

    grammar = XmlGrammar(core_registry().schemas)
    controls = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens(), *THINK_MARKS]
    thinker = Renderer(train_tokenizer([], 256 + len(controls), controls), grammar)
    opening, closing = (np.array([thinker.tokenizer.control_id(mark)]) for mark in THINK_MARKS)
    message = np.concatenate(
        [opening, thinker.tokenizer.encode("hmm " * 5), closing, thinker.message([READ])]
    )
    thinking, calls, text = _split_message(message.tolist(), thinker).tolist()
    assert thinking in range(20, 23)
    assert text == 0 or calls + text + thinking == len(message)
    assert calls >= len(thinker.message([READ])) - 2


def test_length_is_priced_in_an_episode_and_stands_in_its_facts() -> None:
    length = LengthConfig(weight=0.5, k=2.0, q=0.5)
    trajectory = run_episode(new_environment(reward=RewardConfig(length=length)), scripted(SOLVES))
    effort = Effort(**trajectory.facts["effort"])
    expected = -0.5 * concave_price(effort.weighted(length), 2.0, 0.5)
    assert trajectory.reward is not None
    assert trajectory.reward.terms["length"] == pytest.approx(expected)
    assert trajectory.reward.total == pytest.approx(1.0 + expected)
    assert with_length(compute_reward(evidence(), RewardConfig()), effort, length).terms["length"] < 0


# ---- the changes themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        ("def f():\n    return 1\n", "def f():\n    return 2\n", 0),
        ("def f():\n    return 1\n", "def f():\n\treturn 2\n", 1),
        ("def f():\n\treturn 1\n", "def f():\n    return 2\n", 1),
        ("x = 1\n", "x = 1  \ny = 2\n", 1),
        ("x = 1\n", "x = 1\ny = '" + "a" * 100 + "'\n", 1),
        ("z = '" + "b" * 120 + "'\n", "z = '" + "a" * 120 + "'\n", 0),
        ("x = 1  \n", "x = 1  \ny = 2\n", 0),
        (None, "x = 1 \n", 1),
        ("x = 1\n", "", 0),
    ],
)
def test_added_lines_in_another_style_are_counted(before, after, count) -> None:
    assert count_foreign_lines(before, after, 100) == count


@pytest.mark.parametrize("comment", ["", "  # noqa", "  # noqa: F401", "\n    # ruff: noqa"])
def test_new_lints_are_priced_whatever_comments_say_and_old_ones_are_not(comment: str) -> None:
    task = Task(
        **{
            **{name: getattr(TASK, name) for name in TASK.__dataclass_fields__},
            "files": {**TASK.files, "lib/tally.py": "import os\ndef tally(xs):\n    return sum(xs) - 1\n"},
        }
    )
    mend = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "3", "text": "    return sum(xs)"})
    sloppy = ToolCall(
        "edit_lines",
        {"path": "lib/tally.py", "start": "3", "text": f"    import json{comment}\n    return sum(xs)"},
    )
    environment = new_environment(reward=RewardConfig(lint_penalty=0.25))
    clean = run_episode(environment, scripted(((mend,), (FINISH,))), task)
    spoilt = run_episode(environment, scripted(((sloppy,), (FINISH,))), task)
    assert clean.reward is not None and spoilt.reward is not None
    assert clean.reward.total == 1.0
    assert spoilt.reward.terms["lints"] == -0.25


def test_a_failed_session_keeps_its_verdict_whatever_its_changes_look_like() -> None:
    environment = new_environment(reward=RewardConfig(style_penalty=0.25))
    trajectory = run_episode(environment, scripted(FAILS))
    assert trajectory.reward is not None
    assert (trajectory.reward.task, dict(trajectory.reward.terms)) == (0.0, {"malformed": 0.0, "limit": 0.0})
