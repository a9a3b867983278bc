"""Normalisers: the weight of one token's loss in an update. Lengths and weights by group and chain.

A chain is one trajectory with all its segments. `lengths[g][i]` is the number of trained tokens of chain i of
group g over all of its segments; the result has the weight of each of these tokens, which is the same in
every segment. So a chain's segments together weigh what one sequence of their tokens would, in every
normaliser: how often a session was summarised changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from etude.config import Normalizer

Lengths = Sequence[Sequence[int]]
Weights = list[list[float]]


def group_constant(lengths: Lengths, constant_tokens: int) -> Weights:
    """1 / (chains * constant): a sum per chain, no length in it.

    Neither long failures nor short successes are favoured (Dr.GRPO, Liu et al. 2025). Chains count alike: one
    of a small group, such as a fork's, weighs no more than one of a large group.
    """
    count = sum(len(group) for group in lengths)
    return [[1.0 / (count * constant_tokens)] * len(group) for group in lengths]


def tokens(lengths: Lengths, constant_tokens: int) -> Weights:
    """1 / trained tokens of the update: the mean over tokens (DAPO, Yu et al. 2025)."""
    total = max(1, sum(sum(group) for group in lengths))
    return [[1.0 / total] * len(group) for group in lengths]


def sequences(lengths: Lengths, constant_tokens: int) -> Weights:
    """1 / (chains * own tokens): the mean over chains of the mean over tokens (GRPO, Shao et al. 2024)."""
    count = sum(len(group) for group in lengths)
    return [[1.0 / (count * max(1, length)) for length in group] for group in lengths]


NORMALIZERS: Mapping[Normalizer, Callable[[Lengths, int], Weights]] = {
    "group_constant": group_constant,
    "tokens": tokens,
    "sequences": sequences,
}
"""By their names in the configuration."""
