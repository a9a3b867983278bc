"""Chooses the number of compute threads of a training stage, measured on the stage's own steps.

    step 0 warms up ──> 1, 2, 4 ... threads in turn, five steps each ──> the least median time per token
                                          (or more threads, where that takes hardly longer)

The number does not change a run's results (see `training.threads`), so the run's own steps are measured. Two
virtual cores may perform as one core or two, depending on other users of the machine: it is measured again at
intervals, by each stage, and when a run is resumed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from etude.config import RunConfig
from etude.model import LanguageModel

_ROUNDS = 5
_TIE = 1.05
"""More threads are chosen up to this multiple of the least time: they gain more when other programs end."""
_STEPS_BETWEEN = 200
"""Steps from one measurement to the next."""


class ThreadChoice:
    """The number of threads of one stage."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        title: str,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`config`: resolved. `model`: the trained one. At most the current number of threads is used; there
        is no choice with a configured number, on one core, and where threads do not share micro-batches: with
        several ranks, on a GPU, for models of transformers. `title`: of the stage, for messages."""
        limit = torch.get_num_threads()
        elsewhere = (
            config.parallel.ranks > 1 or config.device != "cpu" or not isinstance(model, LanguageModel)
        )
        fixed = bool(config.num_threads) or elsewhere
        self._counts = [] if fixed else [n for n in (1, 2, 4, 8, 16) if n < limit] + [limit]
        self._title, self._say, self._clock = title, say, clock
        self._times: list[float] = []
        """Seconds per token of the measured steps, cycling through `_counts`."""
        self._wait = 1
        """Steps until measuring begins; the first one warms up."""
        self.chosen = 0 if len(self._counts) > 1 else limit
        """The number of threads; 0 until the first measurement is complete."""

    def step(self, take: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Calls `take`, which takes a step and returns its metrics, on the chosen or measured threads."""
        before, began = torch.get_num_threads(), self._clock()
        measures = len(self._counts) > 1 and not self._wait
        turn = self._counts[len(self._times) % len(self._counts)] if measures else self.chosen
        if self._counts:
            torch.set_num_threads(turn or self._counts[0])
        try:
            figures = take()
        finally:
            torch.set_num_threads(before)
        num_tokens = figures.get("tokens", figures.get("train_tokens", 0.0))
        if not num_tokens:
            return figures
        if measures:
            self._add((self._clock() - began) / num_tokens)
        else:
            self._wait = max(0, self._wait - 1)
        return figures

    def _add(self, token_s: float) -> None:
        self._times.append(token_s)
        size = len(self._counts)
        if len(self._times) < _ROUNDS * size:
            return
        rounds = [self._times[first : first + size] for first in range(0, len(self._times), size)]
        # Relative to the same round's first, so that a round that was slow altogether has no effect.
        ratios = [statistics.median(times[place] / times[0] for times in rounds) for place in range(size)]
        most = _TIE * min(ratios)
        chosen = max(count for count, ratio in zip(self._counts, ratios, strict=True) if ratio <= most)
        if chosen != self.chosen:
            pairs = zip(ratios, self._counts, strict=True)
            shown = ", ".join(f"{1 / ratio:.2f} on {count}" for ratio, count in pairs)
            self._say(
                f"{self._title}: {chosen} of {self._counts[-1]} threads (relative speed: {shown}; "
                f"within {_TIE - 1:.0%} the most threads are taken)"
            )
        self.chosen, self._times, self._wait = chosen, [], _STEPS_BETWEEN
