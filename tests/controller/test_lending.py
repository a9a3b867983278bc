"""A pool lends replicas to a run by schedule and by load: returning users get them back, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from etude.inference.router.server.loans import LoanKeeper
from etude.records import PolicyVersion, SampleChunk
from tests.controller.borrowing import Run, running, state_of, until, version_of
from tests.inference.server.lending import HOME, lendable
from tests.inference.server.serving import ADMIN, Served

NOON, NIGHT, MORNING = 12 * 3600.0, 2 * 3600.0, 7 * 3600.0
POOLS = {"lender": "serve", "borrower": "rollout"}
TOKENS = 40


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Served]]:
    with lendable() as one, lendable() as other:
        yield [one, other]


@dataclass
class Users:
    """Ask through the router; what they were answered."""

    run: Run
    answers: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    @contextlib.asynccontextmanager
    async def asking(self, num: int = 8, max_tokens: int = 200) -> AsyncIterator[None]:
        """Each asks again as soon as it is answered, until the end of the block."""
        stopped = asyncio.Event()

        async def ask() -> None:
            while not stopped.is_set():
                body = {"prompt": "def ", "max_tokens": max_tokens}
                answer = await self.run.router.post("/v1/completions", json=body, timeout=120.0)
                self.answers.append((answer.status_code, answer.json().get("system_fingerprint", "")))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num):
                tasks.create_task(ask())
            try:
                yield
            finally:
                stopped.set()

    def check(self) -> None:
        """All of them, with the weights that users get."""
        assert set(self.answers) == {(200, HOME)}


@dataclass
class Sessions:
    """A run's, one message each, pinned to the version in service; what was sampled, by number."""

    run: Run
    version: PolicyVersion
    ended: dict[int, list[SampleChunk]] = field(default_factory=dict[int, list[SampleChunk]])
    begun: int = 0

    @contextlib.asynccontextmanager
    async def going(self, num: int = 12) -> AsyncIterator[None]:
        """So many at a time, until the end of the block."""
        stopped = asyncio.Event()

        async def play() -> None:
            while not stopped.is_set():
                number, self.begun = self.begun, self.begun + 1
                self.ended[number] = await self.run.sample(number, TOKENS, version=self.version)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num):
                tasks.create_task(play())
            try:
                yield
            finally:
                stopped.set()

    async def check(self) -> None:
        """Every session that began has ended once, whole, with this version's tokens alone: those that one
        engine gives it."""
        assert sorted(self.ended) == list(range(self.begun))
        for number in (*range(4), *range(self.begun - 4, self.begun)):
            again = await self.run.sample(number, TOKENS, version=self.version)
            assert tokens_of(self.ended[number]).tolist() == tokens_of(again).tolist()
        for chunks in self.ended.values():
            assert {chunk.version for chunk in chunks} == {self.version}
            assert len(tokens_of(chunks)) == TOKENS or chunks[-1].finish == "stop"
        assert self.run.faults == {}


def tokens_of(chunks: list[SampleChunk]) -> np.ndarray:
    return np.concatenate([chunk.tokens for chunk in chunks])


async def borrowed(run: Run, replicas: list[Served]) -> Served:
    """The replica that samples for the run, once there is one."""
    await until(lambda: run.pool.num_lent == 1)
    (one,) = (served for served in replicas if state_of(served) == "lent")
    return one


def all_home(run: Run, replicas: list[Served]) -> bool:
    ready = [replica.ready for replica in run.proxy.router.replicas.values()]
    return all(ready) and [version_of(served) for served in replicas] == [HOME] * len(replicas)


@pytest.mark.slow
def test_a_schedule_lends_by_night_and_users_of_the_night_have_their_replica_back_at_once(
    replicas: list[Served], tmp_path: Path
) -> None:
    day_s = [NOON]
    night = {**POOLS, "count": 2, "start": "22:00", "end": "06:00", "busy_tokens": 100.0}
    lending = {"windows": [night], "hold_s": 0.5}

    async def body() -> None:
        async with running(replicas, tmp_path, lending=lending, day=lambda: day_s[0]) as run:
            users, sessions = Users(run), Sessions(run, await run.serve(1))
            async with sessions.going():
                async with users.asking(num=1, max_tokens=4):
                    await until(lambda: len(users.answers) >= 3)
                    assert run.pool.num_lent == 0, "it is noon"
                    day_s[0] = NIGHT
                    await borrowed(run, replicas)
                async with users.asking():
                    await until(lambda: run.pool.num_lent == 0 and all_home(run, replicas))
                    num_ended = len(sessions.ended)
                    await until(lambda: len(sessions.ended) > num_ended + 8)
                await borrowed(run, replicas)
                day_s[0] = MORNING
                await until(lambda: run.pool.num_lent == 0 and all_home(run, replicas))
            users.check()
            await sessions.check()
            assert run.events().count("joined") >= 2

    asyncio.run(body())


@pytest.mark.slow
def test_load_lends_and_users_who_come_back_have_their_replica_at_once(
    replicas: list[Served], tmp_path: Path
) -> None:
    rule = {**POOLS, "busy_tokens": 100.0, "idle_tokens": 20.0}
    lending = {"by_load": [rule], "hold_s": 0.5}

    async def body() -> None:
        async with running(replicas, tmp_path, lending=lending) as run:
            users, sessions = Users(run), Sessions(run, await run.serve(1))
            async with sessions.going(24):
                await borrowed(run, replicas)
                async with users.asking():
                    await until(lambda: run.pool.num_lent == 0 and all_home(run, replicas))
                    num_ended = len(sessions.ended)
                    await until(lambda: len(sessions.ended) > num_ended + 8)
                await borrowed(run, replicas)
            await until(lambda: run.pool.num_lent == 0 and all_home(run, replicas))  # the run has no need
            users.check()
            await sessions.check()

    asyncio.run(body())


@pytest.mark.slow
def test_a_router_that_has_forgotten_its_loans_gets_the_replica_back_and_lends_it_again(
    replicas: list[Served], tmp_path: Path
) -> None:
    async def body() -> None:
        async with running(replicas, tmp_path) as run:
            sessions = Sessions(run, await run.serve(1))
            await run.hand("lend", replicas[0], pool="rollout")
            async with sessions.going():
                assert await borrowed(run, replicas) is replicas[0]
                run.proxy.loans = LoanKeeper(run.proxy, ADMIN)  # as one that has been started again
                await until(lambda: run.events().count("left") == 1)
                await until(lambda: run.events().count("joined") == 2)
            await sessions.check()

    asyncio.run(body())
