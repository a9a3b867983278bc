"""Scoring between the steps of a service: a part, a step, a part, ...

    score() ──part──> the loop's next step ──> part ──> ... ──> scores
                ^                                │
                └──── at once while the loop is idle

A part is as long as the largest prefill chunk, so a step waits for one part at most, as it would for another
session's prompt. Under a reproducible schedule, all parts are computed before the next step: the number of
steps must not depend on how long the thread takes.
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
from etude.inference.requests import not_served
from etude.inference.scoring import Scoring
from etude.inference.turns import EngineTurns
from etude.records import PolicyVersion, Scores


class Scorer:
    """Scores one sequence at a time. The service's loop reports its steps and idle times to it."""

    def __init__(self, engine: Engine, turns: EngineTurns, *, at_once: bool) -> None:
        """`at_once`: whether all parts are computed in one turn."""
        self._engine = engine
        self._turns = turns
        self._at_once = at_once
        self._idle = False
        self._next_part = asyncio.Event()
        self._failure: BaseException | None = None
        self.weights_lock = asyncio.Lock()
        """Held by scorings and by weight swaps: all scores of a sequence are of one version."""

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score."""
        async with self.weights_lock:
            scoring = await self._turns.run_in_loop(lambda: self._begin(tokens, version))
            try:
                while not scoring.is_done:
                    await self._compute(scoring)
            finally:
                self._turns.when_free(functools.partial(self._engine.end_score, scoring))
                self._turns.run_deferred()
        return scoring.scores()

    def on_step(self) -> None:
        """To be called after each step of the loop: the next part may run."""
        self._next_part.set()

    @contextlib.asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Context in which the loop is idle: parts follow each other at once."""
        self._idle = True
        self._next_part.set()
        try:
            yield
        finally:
            self._idle = False

    def stop(self, failure: BaseException) -> None:
        """To be called when the loop has failed: ends the scoring with an error."""
        self._failure = failure
        self._next_part.set()

    def _begin(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scoring:
        current = self._engine.current()
        if version != current:
            raise not_served(version, current)
        return self._engine.begin_score(tokens)

    async def _compute(self, scoring: Scoring) -> None:
        """Computes one part and waits for the step after it, or computes all parts."""
        num_threads = torch.get_num_threads()

        def work() -> None:
            torch.set_num_threads(num_threads)  # each thread has its own, and sums are split accordingly
            scoring.advance()
            while self._at_once and not scoring.is_done:
                scoring.advance()

        try:
            await self._turns.run_in_thread(work)
        finally:
            self._turns.run_deferred()
        if not (scoring.is_done or self._idle or self._failure is not None):
            self._next_part.clear()
            await self._next_part.wait()
        if self._failure is not None and not scoring.is_done:
            raise SamplerError("the engine has failed", received=repr(self._failure))
