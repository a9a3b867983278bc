"""How many threads a stage of training runs on: found on the stage's own first steps.

    step 0 warms up ──> 1, 2, 4 ... threads in turn, five steps each ──> the least median time per token
                                          (or more threads, where that takes hardly longer)

The number changes no bit of a run (see `training.threads`), so the steps that are measured are the run's own.
Two virtual cores may be one core's worth or two, as others use them: each stage measures again, and so does a
run that is resumed.
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
_TIE = 1.03
"""Up to so many times the least time, more threads are taken: they gain more when others leave."""


class ThreadChoice:
    """The threads of one stage."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        title: str,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`config`: settled. `model`: what is trained. At most as many threads as are set now; there is no
        choice with a configured number, on one core, and where threads do not share micro-batches: with
        several ranks, on a GPU, of transformers' models. `title`: of the stage, for people."""
        limit = torch.get_num_threads()
        elsewhere = (
            config.parallel.ranks > 1 or config.device != "cpu" or not isinstance(model, LanguageModel)
        )
        fixed = bool(config.num_threads) or elsewhere
        self._counts = [] if fixed else [n for n in (1, 2, 4, 8, 16) if n < limit] + [limit]
        self._title, self._say, self._clock = title, say, clock
        self._times: list[float] = []
        """Seconds per token of the measured steps, the counts in turn."""
        self._is_warm = False
        self.chosen = 0 if len(self._counts) > 1 else limit
        """0 as long as it is being measured."""

    def step(self, take: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Takes a step, which returns its metrics, on as many threads as its turn is."""
        before, began = torch.get_num_threads(), self._clock()
        count = self.chosen or self._counts[len(self._times) % len(self._counts)]
        if self._counts:
            torch.set_num_threads(count)
        try:
            figures = take()
        finally:
            torch.set_num_threads(before)
        num_tokens = figures.get("tokens", figures.get("train_tokens", 0.0))
        if not self.chosen and num_tokens:
            if self._is_warm:
                self._add((self._clock() - began) / num_tokens)
            self._is_warm = True
        return figures

    def _add(self, token_s: float) -> None:
        self._times.append(token_s)
        num_counts = len(self._counts)
        if len(self._times) < _ROUNDS * num_counts:
            return
        medians = [statistics.median(self._times[place::num_counts]) for place in range(num_counts)]
        by_count = list(zip(self._counts, medians, strict=True))
        self.chosen = max(count for count, median in by_count if median <= _TIE * min(medians))
        rates = ", ".join(f"{1 / median:,.0f} on {count}" for count, median in by_count)
        self._say(f"{self._title}: {self.chosen} of {self._counts[-1]} threads (tokens/s: {rates})")
