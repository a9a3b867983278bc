"""Adaptive draft length for speculative decoding, from acceptance rates and the cost of a step.

Costs are counted in rows of a step, and no clock is read: equal calls draft equally and take equally many
steps, whatever the load of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.model import DraftLayers, LanguageModel

_FIRST_GUESS, _GUESS_DRAFTS = 0.95, 8.0
"""Prior of the acceptance rate, and its weight in observed drafts."""
_MEMORY_DRAFTS = 64.0
"""Half-life of an observation, in drafts."""
_CALIBRATED_DRAFTS, _CALIBRATED_CALLS = 16.0, 4
"""Verified drafts, or steps that might draft, after which a request's acceptance rate counts as known."""
_FORGET_STEPS = 2048
"""Steps after which the average over all sessions is reset."""
_LEAST_GAIN = 1.05
"""Least gain in tokens per cost for which a session drafts."""
_SHARES = np.linspace(0.0, 1.0, 101)
_NEAR_WEIGHTS = 2 << 20
"""Weights that fit into a core's cache."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step, in units of the cost of one more row."""

    fixed: float
    """Cost of any step, whatever its number of rows: weights read, or kernels launched, once."""
    draft: float = 0.0
    """Cost of making one draft, as a share of a step that has one row of each session."""


def step_cost(kernels: str, model: LanguageModel, drafts: DraftLayers | None) -> StepCost:
    """The cost of an engine's steps, estimated from its weights. Native code on a processor of 2 MiB of cache
    per core takes 16 times a row's time to read those of a large model, once for all rows, and less than a
    row's where they are in its cache; the costs of PyTorch's operators and of a GPU's launches are
    guesses."""
    size = sum(parameter.numel() for parameter in model.parameters())
    fixed = {"eager": 16.0, "gpu": 64.0}.get(kernels, 0.3 if size <= _NEAR_WEIGHTS else 16.0)
    if drafts is None:
        return StepCost(fixed)
    head = model.head.numel()
    layer = sum(parameter.numel() for parameter in drafts.layers[0].parameters())
    return StepCost(fixed, (layer + head) / size)


class DraftGauge:
    """Chooses each session's number of drafts to maximise tokens per cost; 0 where drafting gains nothing.

    A new request starts from the average acceptance rate of all. Where drafts do not pay, a session pauses
    drafting until its request ends. The average is reset from time to time, so that drafting is tried again.
    """

    def __init__(self, num_rows: int, num_drafts: int, cost: StepCost | None) -> None:
        """`num_rows`: of `Sequences`; `num_drafts`: most drafts of a session in one step; without a `cost`
        every session drafts that many, whatever their acceptance."""
        self._num_drafts, self._cost = num_drafts, cost
        self._arrivals = np.zeros(num_rows, dtype=np.int64)
        self._paused = np.zeros(num_rows, dtype=np.bool_)
        """Whether the row's request continues without drafts."""
        self._verified = np.zeros(num_rows)
        """Verified drafts of each row's request, older ones weighted less."""
        self._accepted = np.zeros(num_rows)
        """Accepted drafts among them."""
        self._calls = np.zeros(num_rows, dtype=np.int64)
        """Calls of `choose_num_drafts` for the row's request."""
        self._all_verified = self._all_accepted = 0.0
        self._steps = 0

    def choose_num_drafts(self, rows: NDArray[np.int64], arrivals: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] most drafts for each of the sessions in `rows`, which are computed in one step; `arrivals` [N]
        of their requests: a new one resets the row."""
        if self._cost is None:
            return np.full_like(rows, self._num_drafts)
        begun = rows[self._arrivals[rows] != arrivals]
        self._arrivals[rows] = arrivals
        self._verified[begun] = self._accepted[begun] = 0.0
        self._paused[begun] = False
        self._calls[begun] = 0
        self._calls[rows] += 1
        guess = (self._all_accepted + _GUESS_DRAFTS * _FIRST_GUESS) / (self._all_verified + _GUESS_DRAFTS)
        shares = (self._accepted[rows] + _GUESS_DRAFTS * guess) / (self._verified[rows] + _GUESS_DRAFTS)
        best = self._best(shares, self._cost, len(rows))
        self._paused[rows] |= best == 0
        return np.where(self._paused[rows], 0, best)

    def is_calibrated(self, rows: NDArray[np.int64]) -> bool:
        """Whether the acceptance rates of `rows` are known well enough for a run of many steps."""
        if self._cost is None:
            return True
        known = (self._verified[rows] >= _CALIBRATED_DRAFTS) | (self._calls[rows] > _CALIBRATED_CALLS)
        return bool((self._paused[rows] | known).all())

    def record(
        self,
        rows: NDArray[np.int64],
        wanted: NDArray[np.int64],
        drafted: NDArray[np.int64],
        accepted: NDArray[np.int64],
    ) -> None:
        """Counts outcomes: for `rows` [N], `drafted` drafts were verified, at most `wanted` per step, and
        `accepted` of them accepted."""
        some = drafted > 0
        rows, drafted = rows[some], drafted[some]
        right = drafted * _share_of_each(wanted[some], accepted[some] / drafted)
        kept = 0.5 ** (drafted / _MEMORY_DRAFTS)
        self._verified[rows] = kept * self._verified[rows] + drafted
        self._accepted[rows] = kept * self._accepted[rows] + right
        kept = 0.5 ** (float(drafted.sum()) / (8 * _MEMORY_DRAFTS))
        self._all_verified = kept * self._all_verified + float(drafted.sum())
        self._all_accepted = kept * self._all_accepted + float(right.sum())

    def count_steps(self, num_steps: int) -> None:
        """Counts engine steps, with or without drafts."""
        self._steps += num_steps
        if self._steps >= _FORGET_STEPS:
            self.reset()

    def reset(self) -> None:
        """Drops the average acceptance rate, for example because the weights have changed."""
        self._all_verified = self._all_accepted = 0.0
        self._steps = 0

    def _best(self, shares: NDArray[np.float64], cost: StepCost, num_sessions: int) -> NDArray[np.int64]:
        """[N] number of drafts that maximises tokens per cost, given acceptance rates `shares` [N]."""
        counts = np.arange(self._num_drafts + 1)
        alone = cost.fixed / num_sessions + 1
        costs = alone * (1 + counts * cost.draft) + counts
        gains = np.cumsum(shares[:, None] ** counts, axis=1) / costs * alone
        best = gains.argmax(axis=1)
        return np.where(gains.max(axis=1) < _LEAST_GAIN, 0, best)


def _share_of_each(wanted: NDArray[np.int64], accepted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Acceptance rate per draft (given that all before it were accepted) that explains that the share
    `accepted` [N] of `wanted` [N] consecutive drafts was accepted."""
    shares = np.empty_like(accepted)
    for count in set(wanted.tolist()):
        mean = (_SHARES[:, None] ** np.arange(1, count + 1)).mean(axis=1)
        shares[wanted == count] = np.interp(accepted[wanted == count], mean, _SHARES)
    return shares
