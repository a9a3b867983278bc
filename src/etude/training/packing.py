"""Which sequences are computed together: ragged segments into micro-batches, balanced over ranks.

Sequences are laid end to end without padding, each seeing only itself, so a micro-batch costs what its tokens
cost. Two things can still be lost. Memory bounds the tokens of a micro-batch, so one that is badly filled is
one too many. And ranks that exchange parameters or gradients wait for each other at every micro-batch, so the
slowest of each round decides.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from etude.errors import ConfigError

CROSSOVER_TOKENS = 8192
"""Length at which attention costs as much as all the rest, where the caller does not know better."""

Packing = list[list[list[int]]]
"""Per rank, per micro-batch: indices of sequences, longest first. Each rank has as many micro-batches."""


def pack_sequences(
    lengths: Sequence[int],
    max_tokens: int,
    num_ranks: int = 1,
    *,
    least_batches: int = 1,
    shared_tokens: int = 0,
    crossover_tokens: float = CROSSOVER_TOKENS,
) -> Packing:
    """Deals sequences of these many tokens into micro-batches of at most `max_tokens` (or one sequence), for
    each rank at least `least_batches`. `shared_tokens`, with which all begin and fewer than each has, are
    computed once in each micro-batch, but attention's queries, keys and values of them are kept for each
    sequence: three quarters of them are counted once, the rest in each sequence.

    Costs (`sequence_cost`) are levelled, and those of one round, of which each rank has one, are alike. One
    rank has as few micro-batches as best-fit packing needs; each of several may have a round more, where long
    sequences are better met by others than by short ones. The last micro-batches are empty where there are
    too few sequences. A fixed function of the arguments.

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
    """What a sequence costs, in tokens without attention: its own number, and attention's square."""
    return length * (1.0 + length / crossover_tokens)


def _best_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence goes where the least room is left over (Johnson 1974)."""
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
    """Each sequence, longest first, to the bin of least cost that has room (Graham 1969); None where one
    finds no room in any of them."""
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
    """Per round, a micro-batch for each rank.

    While the longest sequence costs more than a micro-batch would on average, it sets the measure of a
    round: the other ranks get as much, as far as memory goes. What is left is levelled.
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
    """Micro-batches in order of falling cost, cut into rounds; empty ones fill up the last."""
    bins = sorted(bins, key=lambda batch: -sum(costs[i] for i in batch))
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return [bins[first : first + num_ranks] for first in range(0, len(bins), num_ranks)]


def _duration(rounds: list[list[list[int]]], costs: Sequence[float]) -> float:
    """What the slowest of each round cost together."""
    return sum(max(sum(costs[i] for i in batch) for batch in batches) for batches in rounds)


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], max_tokens: int, num_ranks: int
) -> tuple[list[list[int]], list[int]]:
    """One round, no rank's micro-batch dearer than the longest sequence, and what is left over."""
    batches: list[list[int]] = [[] for _ in range(num_ranks)]
    rooms, spent = [max_tokens] * num_ranks, [0.0] * num_ranks
    left: list[int] = []
    for index in order:
        fits = [
            (spent[rank], rank)
            for rank in range(num_ranks)
            if not batches[rank]
            or (lengths[index] <= rooms[rank] and spent[rank] + costs[index] <= costs[order[0]])
        ]
        if not fits:
            left.append(index)
            continue
        rank = min(fits)[1]
        batches[rank].append(index)
        rooms[rank] -= lengths[index]
        spent[rank] += costs[index]
    return batches, left
