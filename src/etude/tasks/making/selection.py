"""Selects the verified changes that become tasks: varied, without near-duplicates, split by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from etude.tasks.making.changes import Difficulty, Quotas, Verified, split_of
from etude.tasks.making.tokens import changed_text, code_tokens, runs

NOT_CALIBRATED = "not calibrated"
"""The calibration of a task that no model has solved yet, whose difficulty is estimated from its tests."""
_LEVELS: tuple[Difficulty, ...] = ("easy", "medium", "hard")
_DUPLICATE = 0.8
"""Two changes are duplicates if their differences share so many of their token trigrams (Jaccard index)."""

_Fingerprint = tuple[tuple[str, ...], set[tuple[str, ...]]]
"""Functions and failing tests, and the token trigrams of the difference."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected changes, and the rejected ones with reasons."""

    kept: tuple[Verified, ...]
    rejected: tuple[tuple[Verified, str], ...]
    missed: str = ""
    """The least share that the candidates did not reach, with the actual share; empty if it was reached."""


def select(candidates: Sequence[Verified], quotas: Quotas) -> Selection:
    """Adds candidates in order unless they are refused, then removes the last ones that exceed a quota.

    Upper shares hold exactly for the kept set, which may therefore be small; each reject names the quota. The
    least share of compound tasks removes none: if there are too many tasks, the others are removed first, and
    `missed` reports a share that is too small nevertheless.
    """
    rejected = list[tuple[Verified, str]]()
    kept = list[Verified]()
    per_function, seen = Counter[tuple[str, str]](), list[_Fingerprint]()
    for candidate in candidates:
        reason = _refusal(candidate, per_function, seen, quotas)
        if reason:
            rejected.append((candidate, reason))
            continue
        kept.append(candidate)
        per_function.update(candidate.change.functions)
        seen.append(_fingerprint(candidate))
    while (excess := _find_excess(kept, quotas)) is not None:
        rejected.append((kept.pop(excess[0]), excess[1]))
    num_compound = sum(one.is_compound for one in kept)
    missed = ""
    if num_compound < quotas.least_compound * len(kept):
        missed = (
            f"{num_compound} of {len(kept)} tasks have two files or bugs; {quotas.least_compound:.0%} were "
            "wanted, and the candidates allow no more"
        )
    return Selection(tuple(kept), tuple(rejected), missed)


def _fingerprint(verified: Verified) -> _Fingerprint:
    change = verified.change
    both = [changed_text(change.files[path], verified.reference[path]) for path in sorted(change.files)]
    tokens = code_tokens("\n".join("\n".join(pair) for pair in both))
    where = sorted(f"{path}:{name}" for path, name in change.functions)
    tests = sorted(failure.test for failure in verified.failures)
    return (*where, *tests), set(runs(tokens, 3)) or {tuple(tokens)}


def _refusal(
    candidate: Verified,
    per_function: Counter[tuple[str, str]],
    seen: Sequence[_Fingerprint],
    quotas: Quotas,
) -> str:
    """Why a candidate is rejected at once; empty if it is not."""
    assert candidate.failures, "tests noticed it"
    assert len({split_of(path) for path in candidate.change.files}) == 1, "changes are planned so"
    full = [one for one in candidate.change.functions if per_function[one] >= quotas.most_per_function]
    if full:
        path, name = min(full)
        return f"quota: {quotas.most_per_function} tasks of {path}:{name or 'the module'} already"
    where, tokens = _fingerprint(candidate)
    for other_where, other in seen:
        if where == other_where and len(tokens & other) >= _DUPLICATE * len(tokens | other):
            return "near-duplicate: the same tests fail for nearly the same difference"
    return ""


def _find_excess(kept: Sequence[Verified], quotas: Quotas) -> tuple[int, str] | None:
    """The last task that exceeds a quota, and which; None if all hold. One per operator is always kept."""
    operators = Counter(name for one in kept for name in set(one.change.operators))
    most = max(1.0, quotas.most_per_operator * len(kept))
    frequent = max(sorted(operators), key=operators.__getitem__, default="")
    named = [at for at, one in enumerate(kept) if one.names_edited_line]
    if len(named) > quotas.most_named_lines * len(kept):
        return named[-1], "quota: too many tracebacks name the edited line"
    if operators[frequent] > most:
        mine = [at for at, one in enumerate(kept) if frequent in one.change.operators]
        last = max(mine, key=lambda at: (not kept[at].is_compound, at))
        return last, f"quota: too many tasks of the operator {frequent}"
    if len(kept) > quotas.most_tasks:
        single = [at for at, one in enumerate(kept) if not one.is_compound]
        if single and len(kept) - len(single) <= quotas.least_compound * quotas.most_tasks:
            last = max(
                single, key=lambda at: (max(operators[name] for name in kept[at].change.operators), at)
            )
            return last, "quota: there are tasks enough"
        return len(kept) - 1, "quota: there are tasks enough"
    return None


def grade_tasks(kept: Sequence[Verified]) -> list[Difficulty]:
    """Divides tasks into three equal levels: many lines to search and few failing tests are hard."""

    def hardness(verified: Verified) -> tuple[float, int]:
        return verified.num_suspect_lines / len(verified.failures), len(verified.change.places)

    order = sorted(range(len(kept)), key=lambda at: hardness(kept[at]))
    rank = {at: place for place, at in enumerate(order)}
    return [_LEVELS[len(_LEVELS) * rank[at] // len(kept)] for at in range(len(kept))]
