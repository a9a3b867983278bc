"""Plays many sessions concurrently against a target.

    waiting sessions ──slot free, or arrival time reached──> turn ──> tools ──> turn ... ──> records

Closed load (`concurrency`): a constant number of sessions. Open load (`arrivals_per_s`): sessions arrive at
random (Poisson), independent of the target, as users do; a slow target shows in latency, not in less load.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.load.workload import LoadSession

from etude.errors import ConfigError, EtudeError, InfrastructureError


class LoadError(InfrastructureError):
    """A turn was not answered completely. `field`, an error code or its kind, is what it is counted under."""


@dataclass(slots=True)
class TurnRecord:
    """Timing and token counts of one turn; times in seconds of the runner's clock."""

    session: str
    turn: int
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    """Arrival time of each piece of the answer."""
    arrived_tokens: list[int] = field(default_factory=list)
    """Tokens in each piece, as far as the answer reports them."""
    done_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Input tokens that were cached; None if the target does not report it."""
    output_tokens: int = 0
    error: str = ""
    """Why the answer is incomplete; empty if it is complete."""

    def add_piece(self, now_s: float, tokens: int = 1) -> None:
        """Records the arrival of a piece of the answer."""
        if tokens > 0:
            self.arrivals_s.append(now_s)
            self.arrived_tokens.append(tokens)

    @property
    def latency_s(self) -> float:
        """Time from sending the request to the end of the answer."""
        return self.done_s - self.sent_s

    @property
    def first_token_s(self) -> float | None:
        """Time from sending the request to the first piece; None without any."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    def gaps_s(self) -> list[float]:
        """Inter-token times; the gap before a piece of several tokens is divided among them."""
        gaps: list[float] = []
        for before_s, after_s, tokens in zip(
            self.arrivals_s, self.arrivals_s[1:], self.arrived_tokens[1:], strict=False
        ):
            gaps += [(after_s - before_s) / tokens] * tokens
        return gaps


Clock = Callable[[], float]


class LoadTarget(Protocol):
    """The system under load. Turns of one session are played one after the other."""

    async def turn(self, session: LoadSession, record: TurnRecord, clock: Clock) -> None:
        """Plays turn `record.turn`, filling the record as the answer arrives. Raises LoadError."""
        ...

    async def end(self, session: LoadSession) -> None:
        """Called after the last turn of a session."""
        ...


async def run_load(
    target: LoadTarget,
    sessions: Sequence[LoadSession],
    *,
    concurrency: int | None = None,
    arrivals_per_s: float | None = None,
    turn_limit_s: float = 600.0,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> list[TurnRecord]:
    """Plays all sessions; returns a record of every turn sent. A session ends with its first error.

    Without `concurrency` and `arrivals_per_s` all sessions start at once. `turn_limit_s`: time limit of a
    turn; exceeding it is an error.
    """
    if concurrency is not None and arrivals_per_s is not None:
        raise ConfigError("give concurrency or arrivals_per_s, not both", field="concurrency")
    slots = asyncio.Semaphore(concurrency if concurrency is not None else max(1, len(sessions)))
    generator = random.Random(seed)
    records: list[TurnRecord] = []

    async def play(session: LoadSession, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with slots:
            try:
                await _play(target, session, records, turn_limit_s, clock)
            finally:
                await target.end(session)

    at_s = 0.0
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            group.create_task(play(session, at_s))
            at_s += generator.expovariate(arrivals_per_s) if arrivals_per_s is not None else 0.0
    return records


async def _play(
    target: LoadTarget, session: LoadSession, records: list[TurnRecord], turn_limit_s: float, clock: Clock
) -> None:
    for number, turn in enumerate(session.turns):
        record = TurnRecord(session.id, number, clock())
        records.append(record)
        try:
            async with asyncio.timeout(turn_limit_s):
                await target.turn(session, record, clock)
        except TimeoutError:
            record.error = "timeout"
        except LoadError as error:
            record.error = error.field or "error"
        except EtudeError as error:
            record.error = type(error).__name__
        record.done_s = clock()
        if record.error:
            return
        if turn.tool_s and number + 1 < len(session.turns):
            await asyncio.sleep(turn.tool_s)
