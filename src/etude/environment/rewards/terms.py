"""The terms of the reward, by name: each a number of times that something happened, at a price."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from etude.config import LengthConfig, RewardConfig
from etude.environment.grading import Verdict
from etude.environment.rewards.length import Effort, concave_price
from etude.environment.rewards.review import find_linter
from etude.errors import ConfigError
from etude.kit.importing import import_callable
from etude.records import RewardBreakdown, Status, Task, ToolErrorClass


@dataclass(frozen=True, slots=True)
class Evidence:
    """What terms of the reward see; nothing of it did the agent write down about itself."""

    task: Task
    status: Status
    verdict: Verdict
    facts: Mapping[str, Any]
    """`SessionFacts.to_dict()`: counts over the session."""

    def count(self, name: str) -> int:
        """A count among the facts."""
        return int(self.facts.get(name, 0))

    def errors(self, kind: str) -> int:
        """Tool errors of one class (`ToolErrorClass`)."""
        return int(self.facts.get("errors_by_class", {}).get(kind, 0))


REWARD_VERSION = "1"
"""Version of what the terms mean. What they weigh is the run's configuration."""
MALFORMED = "malformed"
"""Name of the term for malformed calls."""
LENGTH = "length"
"""Name of the term for length."""

_CUSTOM = "rl.reward.custom"
Term = Callable[[Evidence, RewardConfig], float]


def _errors(kind: ToolErrorClass, penalty: Callable[[RewardConfig], float]) -> Term:
    return lambda e, c: -penalty(c) * min(e.errors(kind.value), c.tool_errors_at_most)


TERMS: Mapping[str, Term] = {
    MALFORMED: lambda e, c: -c.malformed_penalty * min(e.count("malformed"), c.malformed_at_most),
    "limit": lambda e, c: -c.limit_penalty if e.status is Status.LIMIT else 0.0,
    "invalid_arguments": _errors(ToolErrorClass.INVALID_ARGUMENTS, lambda c: c.invalid_arguments_penalty),
    "timeout": _errors(ToolErrorClass.TIMEOUT, lambda c: c.timeout_penalty),
    "unexpected_environment": _errors(
        ToolErrorClass.UNEXPECTED_ENVIRONMENT, lambda c: c.unexpected_environment_penalty
    ),
    "todos": lambda e, c: -c.todo_penalty * min(e.count("open_todos"), c.todos_at_most),
    "lints": lambda e, c: -c.lint_penalty * min(e.verdict.lints, c.lints_at_most),
    "style": lambda e, c: -c.style_penalty * min(e.verdict.style, c.styles_at_most),
}
"""Every term but length, which is priced where tokens are known: a price times a count that has a bound."""
_ALWAYS = frozenset({MALFORMED, "limit"})
"""Terms that stand in a breakdown also where they are 0."""


def compute_reward(evidence: Evidence, config: RewardConfig) -> RewardBreakdown:
    """The verdict and every term but length.

    Raises ConfigError for a custom term that fails or gives no finite number, and for terms that overflow.
    Never called for a session that the infrastructure failed.
    """
    assert evidence.status is not Status.INFRASTRUCTURE, "an infrastructure failure is never a reward"
    terms = {name: term(evidence, config) for name, term in TERMS.items()}
    terms = {name: value for name, value in terms.items() if value or name in _ALWAYS}
    for name, weight in config.custom.items():
        terms[name] = weight * _call_custom(name, evidence)
    return _checked(RewardBreakdown(_verdict(evidence, config), terms, REWARD_VERSION))


def with_length(reward: RewardBreakdown, effort: Effort, length: LengthConfig) -> RewardBreakdown:
    """The reward less the price of what was spent. Raises ConfigError where that overflows."""
    price = length.weight * concave_price(effort.weighted(length), length.k, length.q)
    return _checked(replace(reward, terms={**reward.terms, LENGTH: -price}))


def check_reward(config: RewardConfig) -> None:
    """Raises ConfigError where a term cannot be computed here: no linter, no such function."""
    if config.lint_penalty > 0:
        find_linter()
    for name in config.custom:
        import_callable(name, _CUSTOM)


def _verdict(evidence: Evidence, config: RewardConfig) -> float:
    verdict = evidence.verdict
    if verdict.passed:
        return 1.0
    if verdict.reward is not None:
        return config.partial_weight * max(0.0, verdict.reward)
    tests = verdict.num_passed + verdict.num_failed
    return config.partial_weight * verdict.num_passed / tests if tests else 0.0


def _checked(reward: RewardBreakdown) -> RewardBreakdown:
    if not reward.is_finite:
        raise ConfigError(
            "a session's reward is no finite number: its terms, with their weights, are too large",
            field="rl.reward",
            received={name: value for name, value in reward.terms.items() if value},
            fix="lower the weights, or return smaller numbers from your own terms",
        )
    return reward


def _is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _call_custom(name: str, evidence: Evidence) -> float:
    field = f"{_CUSTOM}.{name}"
    term = import_callable(name, _CUSTOM)
    try:
        value = term(evidence)
    except Exception as error:
        raise ConfigError(
            f"raised {error!r}",
            field=field,
            received=f"a session of {evidence.task.id}",
            fix="correct the function, or remove the term",
        ) from error
    if not _is_finite(value):
        raise ConfigError(
            "must return a finite number",
            field=field,
            received=f"an integer of {value.bit_length()} bits"
            if isinstance(value, int)
            else repr(value)[:100],
            fix="correct the function, or remove the term",
        )
    return float(value)
