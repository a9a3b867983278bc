"""Rewards: the verdict of hidden tests, and priced terms for what a session did, changed and spent.

Each term is a count times a price. Length is priced by a concave function of the tokens spent: the price of
one more token falls with their number (Cursor, Composer), so the model is quick on easy tasks, and may work
long on hard ones. The agent's changes are reviewed outside of the sandbox, as they are graded: manipulating
the tools in the sandbox has no effect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from etude.agent.tools.linters import HostRuff, new_findings
from etude.config import LengthConfig, RewardConfig
from etude.environment.grading import Verdict
from etude.errors import ConfigError
from etude.errors.packages import missing_package
from etude.kit.importing import import_callable
from etude.kit.syntax import read_text
from etude.kit.tasks import gather_bounded, off_loop
from etude.records import RewardBreakdown, Segment, Status, Task, ToolErrorClass, Trajectory
from etude.tokens.grammar import CallFinished, CallStarted, ReasoningDelta, TextDelta
from etude.tokens.renderer import Renderer
from etude.tokens.stream import MessageStream

_UNIT = 1000.0
"""Effort is priced in thousands."""
_LINTED = (".py", ".pyi")
_LINTERS = 4
"""Most that run at once, however many files an agent changed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the reward's terms; none of it is the agent's own account of itself."""

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
"""Version of the terms' definitions. Their weights are in the run's configuration."""
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
"""All terms except length, which is added once tokens are counted: a price times a bounded count."""
_ALWAYS = frozenset({MALFORMED, "limit"})
"""Terms that are in a breakdown even if they are 0."""


def compute_reward(evidence: Evidence, config: RewardConfig) -> RewardBreakdown:
    """The verdict and all terms except length.

    Raises ConfigError for a custom term that fails or returns no finite number, and for terms that overflow.
    Never called for a session that the infrastructure failed.
    """
    assert evidence.status is not Status.INFRASTRUCTURE, "an infrastructure failure is never a reward"
    terms = {name: term(evidence, config) for name, term in TERMS.items()}
    terms = {name: value for name, value in terms.items() if value or name in _ALWAYS}
    for name, weight in config.custom.items():
        terms[name] = weight * _call_custom(name, evidence)
    return _checked(RewardBreakdown(_verdict(evidence, config), terms, REWARD_VERSION))


def with_length(reward: RewardBreakdown, effort: Effort, length: LengthConfig) -> RewardBreakdown:
    """The reward minus the price of the effort. Raises ConfigError if that overflows."""
    price = length.weight * concave_price(effort.weighted(length), length.k, length.q)
    return _checked(replace(reward, terms={**reward.terms, LENGTH: -price}))


def check_reward(config: RewardConfig) -> None:
    """Raises ConfigError if a term cannot be computed here: no linter, no such function."""
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
            "a session's reward is not a finite number: its terms, with their weights, are too large",
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


@dataclass(frozen=True, slots=True)
class Effort:
    """What a session spent. Tokens are sampled ones, except `output_tokens`."""

    thinking_tokens: int = 0
    call_tokens: int = 0
    message_tokens: int = 0
    output_tokens: int = 0
    """Tokens of tool results and later messages of the user, including template tokens."""
    first_calls: int = 0
    """Number of turns with a call."""
    parallel_calls: int = 0
    """Further calls of the same turns."""
    turns: int = 0

    def weighted(self, config: LengthConfig) -> float:
        """The weighted sum, in thousands."""
        return (
            config.thinking_token * self.thinking_tokens
            + config.call_token * self.call_tokens
            + config.message_token * self.message_tokens
            + config.output_token * self.output_tokens
            + config.call * (self.first_calls + config.parallel_share * self.parallel_calls)
            + config.turn * self.turns
        ) / _UNIT


def concave_price(x: float, k: float, q: float) -> float:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), and log(1 + k x) / k where q = 1, for x >= 0.

    C(0) = 0, C'(0) = 1, and the slope falls as (1 + k x)^-q. Exact also near q = 1.
    """
    log = math.log1p(k * x)
    power = (1.0 - q) * log
    # expm1 keeps the digits that cancel where q is near 1, and its limit there is the logarithm.
    return (log if power == 0 else log * math.expm1(power) / power) / k


def measure_effort(trajectory: Trajectory, renderer: Renderer) -> Effort:
    """Measures the effort of a trajectory: all segments, each token once."""
    counts = np.zeros(3, dtype=np.int64)
    output = 0
    for segment in trajectory.segments:
        output += _num_observed(segment)
        for start, end in _sampled_runs(segment):
            counts += _split_message(segment.tokens[start:end].tolist(), renderer)
    calls = [sum(call.error is None for call in turn.calls) for turn in trajectory.turns]
    first = sum(count > 0 for count in calls)
    thinking, in_calls, words = counts.tolist()
    return Effort(thinking, in_calls, words, output, first, sum(calls) - first, len(trajectory.turns))


def _num_observed(segment: Segment) -> int:
    """Tokens that were given after the first sampled one."""
    sampled = segment.sampled
    if not sampled.any():
        return 0
    return int((~sampled[int(sampled.argmax()) :]).sum())


def _sampled_runs(segment: Segment) -> Iterable[tuple[int, int]]:
    """[start, end) of each run of sampled tokens: one message each."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], segment.sampled, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _split_message(tokens: Sequence[int], renderer: Renderer) -> np.ndarray:
    """[thinking, calls, text]: the number of tokens of a message in each.

    A token counts for the part that the parser emits for it; one without an event yet (half a character, a
    tag) for that of the next tokens, and at the end for the previous part.
    """
    stream = MessageStream(renderer)
    counts = np.zeros(3, dtype=np.int64)
    kind, waiting, in_call = 2, 0, False
    for token in tokens:
        waiting += 1
        for event in stream.feed([token]):
            if isinstance(event, CallStarted):
                in_call = True
            kind = _kind_of(event, kind, in_call)
            counts[kind] += waiting
            waiting = 0
            if isinstance(event, CallFinished):
                in_call = False
    counts[kind] += waiting
    return counts


def _kind_of(event: object, before: int, in_call: bool) -> int:
    if isinstance(event, ReasoningDelta):
        return 0
    if in_call:
        return 1
    return 2 if isinstance(event, TextDelta) else before


async def review_changes(
    task: Task, changes: Mapping[str, bytes | None], config: RewardConfig
) -> tuple[int, int]:
    """(new lints, new lines in another style), each 0 if `config` does not price it.

    Raises InfrastructureError if the linter fails, ConfigError if there is none.
    """
    files = {path: data for path, data in changes.items() if data is not None}
    before = {path: task.files[path].encode() for path in files if path in task.files}
    lints = style = 0
    if config.lint_penalty > 0:
        python = [path for path in files if path.endswith(_LINTED)]

        async def count(path: str) -> int:
            linter = find_linter()
            found = await linter.lint(path, files[path])
            if not found or path not in before:
                return len(found)
            known = [finding.key for finding in await linter.lint(path, before[path])]
            return len(new_findings(found, known))

        lints = sum(await gather_bounded(count, python, _LINTERS))
    if config.style_penalty > 0:
        size = sum(map(len, files.values()))
        style = await off_loop(size, _count_style, before, files, config.style_columns)
    return lints, style


def _count_style(before: Mapping[str, bytes], after: Mapping[str, bytes], columns: int) -> int:
    return sum(
        count_foreign_lines(read_text(before.get(path)), text, columns)
        for path, data in after.items()
        if (text := read_text(data)) is not None
    )


def find_linter() -> HostRuff:
    """This machine's ruff. Raises MissingPackageError if there is none."""
    linter = HostRuff.find()
    if linter is None:
        raise missing_package(
            "counting lints", "ruff", field="rl.reward.lint_penalty", instead=", or set lint_penalty = 0"
        )
    return linter


def count_foreign_lines(before: str | None, after: str, columns: int) -> int:
    """Lines of `after` that are not in `before` (None: a new file) and differ in style from it. A line that
    was only moved is in both. Takes time linear in the two.

    Trailing white space; indentation by tabs where the file indents by spaces, or the other way round; more
    than `columns` characters where no line of the file had as many.
    """
    old = [] if before is None else before.splitlines()
    new = after.splitlines()
    tabs, spaces = _indents(old, "\t"), _indents(old, " ")
    wide = any(len(line) > columns for line in old)
    added = Counter(new) - Counter(old)
    return sum(
        times
        for line, times in added.items()
        if line != line.rstrip()
        or (line.startswith("\t") and spaces > tabs)
        or (line.startswith(" ") and tabs > spaces)
        or (len(line) > columns and not wide)
    )


def _indents(lines: list[str], character: str) -> int:
    return sum(line.startswith(character) for line in lines)
