"""Plays sessions against a target, many at once.

    waiting sessions ──slot free, or their time has come──> turn ──> tools ──> turn ... ──> records

Closed load (`concurrency`): so many sessions at a time. Open load (`arrivals_per_s`): sessions come by chance
whatever the target does, which is how users come; a slow target then shows in latency, not in less load.
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
    """A turn that was not answered whole. `field` is what it is counted under: an error code, or its kind."""


@dataclass(slots=True)
class TurnRecord:
    """Times in seconds of the runner's clock."""

    session: str
    turn: int
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    """Of each piece of the answer."""
    arrived_tokens: list[int] = field(default_factory=list)
    """Tokens in each piece, as far as the answer says."""
    done_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Input that was not computed again; None where the target does not say."""
    output_tokens: int = 0
    error: str = ""
    """Why there is no whole answer; empty where there is one."""

    def arrived(self, now_s: float, tokens: int = 1) -> None:
        """A piece of the answer is here."""
        if tokens > 0:
            self.arrivals_s.append(now_s)
            self.arrived_tokens.append(tokens)

    @property
    def latency_s(self) -> float:
        """From sending to the end."""
        return self.done_s - self.sent_s

    @property
    def first_token_s(self) -> float | None:
        """From sending to the first piece; None where none came."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    def gaps_s(self) -> list[float]:
        """Time from token to token: a piece of several tokens shares its gap out."""
        gaps: list[float] = []
        for before_s, after_s, tokens in zip(
            self.arrivals_s, self.arrivals_s[1:], self.arrived_tokens[1:], strict=False
        ):
            gaps += [(after_s - before_s) / tokens] * tokens
        return gaps


Clock = Callable[[], float]


class LoadTarget(Protocol):
    """What is under load. Turns of one session come one after the other."""

    async def turn(self, session: LoadSession, record: TurnRecord, clock: Clock) -> None:
        """Plays turn `record.turn`, and fills the record while the answer comes. Raises LoadError."""
        ...

    async def end(self, session: LoadSession) -> None:
        """The session sends nothing more."""
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
    """Plays all sessions; every turn that was sent has a record. A session ends with its first error.

    Neither limit given: all sessions at once. `turn_limit_s`: a turn unanswered for so long is an error.
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
