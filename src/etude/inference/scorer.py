"""Scoring beside the steps of a service: a part, a step, a part, ...

    score() ──part──> the loop's next step ──> part ──> ... ──> scores
                ^                                │
                └──── at once while the loop rests

A part is as long as the longest piece of a prompt, so a step waits for one part at most, as it does for
somebody else's prompt. Where steps follow a schedule, all is scored before the next one: how many steps there
were must not depend on how long the thread takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

import numpy as np
import torch
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.inference.engine import Engine
from etude.inference.scoring import Scoring
from etude.inference.turns import EngineTurns
from etude.records import PolicyVersion, Scores


class Scorer:
    """Scores one sequence at a time. The service's loop tells it what it does."""

    def __init__(self, engine: Engine, turns: EngineTurns, *, at_once: bool) -> None:
        """`at_once`: all parts in one turn."""
        self._engine = engine
        self._turns = turns
        self._at_once = at_once
        self._resting = False
        self._next_part = asyncio.Event()
        self._failure: BaseException | None = None
        self.same_weights = asyncio.Lock()
        """Held while something is scored: who exchanges weights waits for it, since scores are those of one
        version."""

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score."""
        async with self.same_weights:
            scoring = await self._turns.in_loop(lambda: self._begin(tokens, version))
            try:
                while not scoring.is_done:
                    await self._compute(scoring)
            finally:
                self._turns.when_free(functools.partial(self._engine.end_score, scoring))
                self._turns.catch_up()
        return scoring.scores()

    def stepped(self) -> None:
        """The loop has taken a step."""
        self._next_part.set()

    @contextlib.asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """The loop has nothing to compute meanwhile."""
        self._resting = True
        self._next_part.set()
        try:
            yield
        finally:
            self._resting = False

    def stop(self, failure: BaseException) -> None:
        """The loop has ended: nothing is scored any more."""
        self._failure = failure
        self._next_part.set()

    def _begin(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scoring:
        current = self._engine.current()
        if version != current:
            raise SamplerError(
                "version is not served", field="version", received=f"{version}; serving {current}"
            )
        return self._engine.begin_score(tokens)

    async def _compute(self, scoring: Scoring) -> None:
        """One part, and the step after it; or all parts."""
        num_threads = torch.get_num_threads()

        def work() -> None:
            torch.set_num_threads(num_threads)  # each thread has its own, and sums are split accordingly
            scoring.advance()
            while self._at_once and not scoring.is_done:
                scoring.advance()

        try:
            await self._turns.in_thread(work)
        finally:
            self._turns.catch_up()
        if not (scoring.is_done or self._resting or self._failure is not None):
            self._next_part.clear()
            await self._next_part.wait()
        if self._failure is not None and not scoring.is_done:
            raise SamplerError("the engine has failed", received=repr(self._failure))
