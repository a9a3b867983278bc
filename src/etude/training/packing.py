"""Packs sequences of different lengths into micro-batches, balanced over ranks.

Sequences are laid end to end without padding, each attending only to itself, so a micro-batch costs what its
tokens cost. Two inefficiencies remain. Memory bounds the tokens of a micro-batch, so poorly filled ones mean
more micro-batches. And ranks that exchange parameters or gradients wait for each other at every micro-batch,
so the slowest rank determines the duration of each round.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from etude.errors import ConfigError

CROSSOVER_TOKENS = 8192
"""Default of the sequence length at which attention costs as much as all other operations."""

Packing = list[list[list[int]]]
"""Indices of sequences, longest first, by rank and micro-batch. All ranks have equally many micro-batches."""


def pack_sequences(
    lengths: Sequence[int],
    max_tokens: int,
    num_ranks: int = 1,
    *,
    least_batches: int = 1,
    shared_tokens: int = 0,
    crossover_tokens: float = CROSSOVER_TOKENS,
) -> Packing:
    """Distributes sequences of these lengths over micro-batches of at most `max_tokens` (or one sequence), at
    least `least_batches` per rank. `shared_tokens`: length of a common prefix, shorter than each sequence. It
    is computed once in each micro-batch, but attention's queries, keys and values of it are kept for each
    sequence: three quarters of it are counted once, the rest in each sequence.

    Costs (`sequence_cost`) are balanced: within a round, which has one micro-batch of each rank, they are
    similar. One rank has as few micro-batches as best-fit packing needs; several may have one round more,
    if that pairs long sequences with other long ones. The last micro-batches are empty if there are too few
    sequences. A deterministic function of the arguments.

    Raises ConfigError for lengths, bounds and ranks below 1.
    """
    for field, values in (("lengths", lengths), ("max_tokens", (max_tokens,)), ("num_ranks", (num_ranks,))):
        if min(values, default=1) < 1:
            raise ConfigError("must be at least 1", field=field, received=min(values))
    if shared_tokens:
        once = shared_tokens - shared_tokens // 4
        lengths = [length - once for length in lengths]
        max_tokens = max(1, max_tokens - once)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs = [sequence_cost(length, crossover_tokens) for length in lengths]
    packing: Packing = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for batches in _rounds(order, lengths, costs, max_tokens, num_ranks, least_batches):
        by_cost = sorted(batches, key=lambda batch: (-sum(costs[i] for i in batch), batch))
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, batch in zip(ranks, by_cost, strict=True):
            packing[rank].append(batch)
            totals[rank] += sum(costs[i] for i in batch)
    return packing


def sequence_cost(length: int, crossover_tokens: float = CROSSOVER_TOKENS) -> float:
    """Cost of a sequence in units of one token without attention: linear, plus quadratic for attention."""
    return length * (1.0 + length / crossover_tokens)


def _best_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence goes into the bin where the least room remains (Johnson 1974)."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in order:
        found = bisect.bisect_left(rooms, (lengths[index], -1))
        if found < len(rooms):
            room, place = rooms.pop(found)
        else:
            room, place = max(max_tokens, lengths[index]), len(bins)
            bins.append([])
        bins[place].append(index)
        bisect.insort(rooms, (room - lengths[index], place))
    return bins


def _level(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Puts each sequence, longest first, into the cheapest bin that has room (Graham 1969); None if one fits
    into none of them."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    rooms = [max_tokens] * num_bins
    by_cost = [(0.0, place) for place in range(num_bins)]
    for index in order:
        full: list[tuple[float, int]] = []
        while by_cost and bins[by_cost[0][1]] and rooms[by_cost[0][1]] < lengths[index]:
            full.append(heapq.heappop(by_cost))
        if not by_cost:
            return None
        cost, place = by_cost[0]
        heapq.heapreplace(by_cost, (cost + costs[index], place))
        bins[place].append(index)
        rooms[place] -= lengths[index]
        for entry in full:
            heapq.heappush(by_cost, entry)
    return bins


def _rounds(
    order: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    max_tokens: int,
    num_ranks: int,
    least_batches: int,
) -> list[list[list[int]]]:
    """The micro-batches of all ranks, by round.

    While the longest sequence costs more than an average micro-batch, it determines the cost of a round: the
    other ranks are filled up to it, as far as memory permits. The remaining sequences are balanced.
    """
    rounds: list[list[list[int]]] = []
    while order:
        tight = _best_fit(order, lengths, max_tokens)
        num_rounds = max(-(-len(tight) // num_ranks), least_batches - len(rounds))
        if num_ranks > 1 and costs[order[0]] * num_rounds * num_ranks > sum(costs[i] for i in order):
            batches, order = _fill(order, lengths, costs, max_tokens, num_ranks)
            rounds.append(batches)
            continue
        levelled = _level(order, lengths, costs, max_tokens, num_rounds * num_ranks)
        if levelled is not None:
            return rounds + _by_cost(levelled, costs, num_ranks)
        filled = _by_cost(tight, costs, num_ranks)
        roomier = _level(order, lengths, costs, max_tokens, (num_rounds + 1) * num_ranks)
        spread = filled if roomier is None else _by_cost(roomier, costs, num_ranks)
        return rounds + min(filled, spread, key=lambda found: _duration(found, costs))
    return rounds


def _by_cost(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """Micro-batches in order of falling cost, divided into rounds; empty ones fill the last."""
    bins = sorted(bins, key=lambda batch: -sum(costs[i] for i in batch))
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return [bins[first : first + num_ranks] for first in range(0, len(bins), num_ranks)]


def _duration(rounds: list[list[list[int]]], costs: Sequence[float]) -> float:
    """Sum over rounds of the cost of the most expensive micro-batch."""
    return sum(max(sum(costs[i] for i in batch) for batch in batches) for batches in rounds)


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], max_tokens: int, num_ranks: int
) -> tuple[list[list[int]], list[int]]:
    """One round in which no micro-batch costs more than the longest sequence, and the remaining indices."""
    batches: list[list[int]] = [[] for _ in range(num_ranks)]
    rooms, spent = [max_tokens] * num_ranks, [0.0] * num_ranks
    remaining: list[int] = []
    for index in order:
        fits = [
            (spent[rank], rank)
            for rank in range(num_ranks)
            if not batches[rank]
            or (lengths[index] <= rooms[rank] and spent[rank] + costs[index] <= costs[order[0]])
        ]
        if not fits:
            remaining.append(index)
            continue
        rank = min(fits)[1]
        batches[rank].append(index)
        rooms[rank] -= lengths[index]
        spent[rank] += costs[index]
    return batches, remaining
