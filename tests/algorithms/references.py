"""Reference implementations: every formula of the papers, token by token in double precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

LOW, HIGH, CAP = 0.2, 0.28, 1.5
LIMIT = 20.0

Floats = Sequence[float]


def ratio(new: float, old: float) -> float:
    return math.exp(min(max(new - old, -LIMIT), LIMIT))


def surrogate(value: float, advantage: float, low: float = LOW, high: float = HIGH) -> float:
    bounded = min(max(value, 1 - low), 1 + high)
    return -min(value * advantage, bounded * advantage)


def clip(new: Floats, old: Floats, advantages: Floats) -> list[float]:
    return [surrogate(ratio(n, o), a) for n, o, a in zip(new, old, advantages, strict=True)]


def cispo(new: Floats, old: Floats, advantages: Floats) -> list[float]:
    return [-min(ratio(n, o), CAP) * a * n for n, o, a in zip(new, old, advantages, strict=True)]


def gspo(
    new: Floats, old: Floats, advantages: Floats, sequence: Sequence[int], low: float, high: float
) -> list[float]:
    losses = []
    for i, advantage in enumerate(advantages):
        members = [j for j, number in enumerate(sequence) if number == sequence[i]]
        mean = sum(new[j] - old[j] for j in members) / len(members)
        losses.append(surrogate(math.exp(min(max(mean, -LIMIT), LIMIT)), advantage, low, high))
    return losses


def decoupled(new: Floats, proximal: Floats, behaviour: Floats, advantages: Floats) -> list[float]:
    return [
        ratio(p, b) * surrogate(ratio(n, p), a)
        for n, p, b, a in zip(new, proximal, behaviour, advantages, strict=True)
    ]


def tis(proximal: Floats, rollout: Floats, cap: float) -> list[float]:
    return [min(ratio(p, r), cap) for p, r in zip(proximal, rollout, strict=True)]


def icepop(proximal: Floats, rollout: Floats, low: float, high: float) -> list[bool]:
    return [low <= ratio(p, r) <= high for p, r in zip(proximal, rollout, strict=True)]


def geometric(
    proximal: Floats, rollout: Floats, sequence: Sequence[int], low: float, high: float
) -> list[bool]:
    kept = []
    for number in sequence:
        gaps = [p - r for p, r, n in zip(proximal, rollout, sequence, strict=True) if n == number]
        kept.append(low <= math.exp(sum(gaps) / len(gaps)) <= high)
    return kept


def k3(new: float, reference: float) -> float:
    gap = min(max(reference - new, -LIMIT), LIMIT)
    return math.exp(gap) - 1 - gap
