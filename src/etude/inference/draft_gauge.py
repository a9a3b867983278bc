"""How many drafts are worth computing: by how often they stood, and by what a step costs.

Costs are counted in rows of a step, and no clock is read: equal calls draft equally, whatever the machine did
meanwhile, and so take equally many steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.model import DraftLayers, LanguageModel

_FIRST_GUESS, _GUESS_DRAFTS = 0.95, 8.0
"""The share of drafts that stand, as long as nothing is known, and how many observed ones that is worth."""
_MEMORY_DRAFTS = 64.0
"""Drafts after which one counts half."""
_SETTLED_DRAFTS, _SETTLED_CALLS = 16.0, 4
"""Drafts seen of a request, or times that it was tried, after which it is known well enough."""
_FORGET_STEPS = 2048
"""Steps after which what was learned of all sessions is dropped."""
_LEAST_GAIN = 1.05
"""Times as many tokens for their cost, below which there are no drafts."""
_SHARES = np.linspace(0.0, 1.0, 101)
_NEAR_WEIGHTS = 2 << 20
"""Weights that a processor has near at hand."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs, in units of what one more row costs."""

    fixed: float
    """Of a step, however many rows it has: what is read, or launched, once for all of them."""
    draft: float = 0.0
    """Of making one draft, as a share of a step that has one row of each session."""


def step_cost(kernels: str, model: LanguageModel, drafts: DraftLayers | None) -> StepCost:
    """What steps of an engine cost, judged by its weights. Native code on a processor of 2 MiB of cache per
    core takes 16 times a row's time to read those of a large model, once for all rows, and less than a row's
    where they are near; what PyTorch's operators or a GPU's launches cost is a guess."""
    size = sum(parameter.numel() for parameter in model.parameters())
    fixed = {"eager": 16.0, "gpu": 64.0}.get(kernels, 0.3 if size <= _NEAR_WEIGHTS else 16.0)
    if drafts is None:
        return StepCost(fixed)
    head = model.head.numel()
    layer = sum(parameter.numel() for parameter in drafts.layers[0].parameters())
    return StepCost(fixed, (layer + head) / size)


class DraftGauge:
    """Says how many drafts each session is worth: as many as make the most tokens for their cost; none where
    that is not more than without.

    A session of which nothing is known is taken to be like the others. Where drafts do not pay it rests until
    its request ends. What is known of all is forgotten from time to time, so that they are tried again.
    """

    def __init__(self, num_rows: int, num_drafts: int, cost: StepCost | None) -> None:
        """`num_rows`: of `Sequences`; `num_drafts`: most drafts of a session in one step; without a `cost`
        that is what each is worth, whatever becomes of them."""
        self._num_drafts, self._cost = num_drafts, cost
        self._arrivals = np.zeros(num_rows, dtype=np.int64)
        self._rests = np.zeros(num_rows, dtype=np.bool_)
        """Whether the row's request goes on without drafts."""
        self._seen = np.zeros(num_rows)
        """Drafts observed of each row's request, older ones counting less."""
        self._right = np.zeros(num_rows)
        """Of those, the ones that stood."""
        self._asked = np.zeros(num_rows, dtype=np.int64)
        """Times that somebody wanted to know of the row's request."""
        self._all_seen = self._all_right = 0.0
        self._steps = 0

    def wanted(self, rows: NDArray[np.int64], arrivals: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] most drafts for each of the sessions in `rows`, which are computed together; `arrivals` [N] of
        their requests."""
        if self._cost is None:
            return np.full_like(rows, self._num_drafts)
        begun = rows[self._arrivals[rows] != arrivals]
        self._arrivals[rows] = arrivals
        self._seen[begun] = self._right[begun] = 0.0
        self._rests[begun] = False
        self._asked[begun] = 0
        self._asked[rows] += 1
        guess = (self._all_right + _GUESS_DRAFTS * _FIRST_GUESS) / (self._all_seen + _GUESS_DRAFTS)
        shares = (self._right[rows] + _GUESS_DRAFTS * guess) / (self._seen[rows] + _GUESS_DRAFTS)
        best = self._best(shares, self._cost, len(rows))
        self._rests[rows] |= best == 0
        return np.where(self._rests[rows], 0, best)

    def is_settled(self, rows: NDArray[np.int64]) -> bool:
        """Whether enough is known of the sessions in `rows` to go on for many steps."""
        if self._cost is None:
            return True
        known = (self._seen[rows] >= _SETTLED_DRAFTS) | (self._asked[rows] > _SETTLED_CALLS)
        return bool((self._rests[rows] | known).all())

    def note(
        self,
        rows: NDArray[np.int64],
        wanted: NDArray[np.int64],
        drafted: NDArray[np.int64],
        stood: NDArray[np.int64],
    ) -> None:
        """Of `rows` [N], `drafted` drafts were verified, at most `wanted` in each step, and `stood` of them
        were right."""
        some = drafted > 0
        rows, drafted = rows[some], drafted[some]
        right = drafted * _share_of_each(wanted[some], stood[some] / drafted)
        kept = 0.5 ** (drafted / _MEMORY_DRAFTS)
        self._seen[rows] = kept * self._seen[rows] + drafted
        self._right[rows] = kept * self._right[rows] + right
        kept = 0.5 ** (float(drafted.sum()) / (8 * _MEMORY_DRAFTS))
        self._all_seen = kept * self._all_seen + float(drafted.sum())
        self._all_right = kept * self._all_right + float(right.sum())

    def count_steps(self, num_steps: int) -> None:
        """So many steps have been taken, drafted or not."""
        self._steps += num_steps
        if self._steps >= _FORGET_STEPS:
            self.forget()

    def forget(self) -> None:
        """What was learned holds no more: other weights sample, or draft."""
        self._all_seen = self._all_right = 0.0
        self._steps = 0

    def _best(self, shares: NDArray[np.float64], cost: StepCost, num_sessions: int) -> NDArray[np.int64]:
        """[N] number of drafts that makes the most tokens for their cost, for `shares` [N] that stand."""
        counts = np.arange(self._num_drafts + 1)
        alone = cost.fixed / num_sessions + 1
        costs = alone * (1 + counts * cost.draft) + counts
        gains = np.cumsum(shares[:, None] ** counts, axis=1) / costs * alone
        best = gains.argmax(axis=1)
        return np.where(gains.max(axis=1) < _LEAST_GAIN, 0, best)


def _share_of_each(wanted: NDArray[np.int64], stood: NDArray[np.float64]) -> NDArray[np.float64]:
    """The chance that a draft stands if all before it do, where each of `wanted` [N] in a row has that chance
    and the share `stood` [N] of them all stood."""
    shares = np.empty_like(stood)
    for count in set(wanted.tolist()):
        mean = (_SHARES[:, None] ** np.arange(1, count + 1)).mean(axis=1)
        shares[wanted == count] = np.interp(stood[wanted == count], mean, _SHARES)
    return shares
