"""The pool: slots, fair order, and slots released exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.errors import SandboxError
from etude.sandbox.errors import CapacityError, SandboxMissingError
from etude.sandbox.pool import PooledBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Network, Resources
from etude.sandbox.waiting import WaitingLine
from etude_quickstart.memory_backend import MemoryBackend, MemorySandbox
from tests.sandbox.backends import with_sandbox
from tests.sandbox.test_contract import FILES, SCENARIOS

ONE = Template({"a.txt": "1"}, "one")
TWO = Template({"a.txt": "2"}, "two")


class SlowBackend(MemoryBackend):
    """Starts take as long as the test says, and fail when it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.num_created = 0
        self.most_live = 0
        self.failures = 0
        self.begun_s: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> MemorySandbox:
        self.begun_s.append(asyncio.get_running_loop().time())
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise SandboxError("failed on purpose", field="sandbox")
        self.num_created += 1
        made = await super().create(template, resources, network, timeout_s, snapshot, metadata)
        self.most_live = max(self.most_live, len(self.live))
        return made


def in_pool(
    max_live: int,
    scenario: Callable[[PooledBackend, SlowBackend], Awaitable[Any]],
    queue_timeout_s: float = 60.0,
) -> Any:
    """Runs a scenario on a pool over a slow backend; afterwards nothing lives and no place is held."""

    async def run() -> Any:
        inner = SlowBackend()
        pool = PooledBackend(inner, max_live, queue_timeout_s)
        try:
            result = await scenario(pool, inner)
            assert inner.most_live <= max_live
        finally:
            await pool.close()
        assert not inner.live
        return result

    return asyncio.run(run())


async def settled(pool: PooledBackend) -> None:
    """Lets everything behind the scenes come to rest."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the test has no event to wait for
            await asyncio.sleep(0.005)


def test_the_bound_counts_forks_and_kills_free_places_once() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        parent = await pool.create(ONE)
        copies = await parent.fork(2)
        assert pool.num_held == 3
        with pytest.raises(CapacityError):
            await parent.fork(1)
        with pytest.raises(CapacityError, match="3 places in all"):
            await parent.fork(4)
        first = copies[0]
        assert not isinstance(first, SandboxError)
        await asyncio.gather(first.kill(), first.kill())
        await first.kill()
        assert pool.num_held == 2
        await pool.create(ONE)
        assert pool.num_held == 3
        assert len(await pool.list()) == 3

    in_pool(3, scenario, 0.2)


def test_the_error_names_the_limit_who_waits_and_the_fix() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        await pool.create(ONE)
        other = asyncio.ensure_future(pool.create(ONE, metadata={"tenant": "amber"}))
        await asyncio.sleep(0)
        pool.queue_timeout_s = 0.02
        with pytest.raises(CapacityError) as caught:
            await pool.create(ONE, metadata={"tenant": "blue"})
        assert "1 of 1 are held" in caught.value.message
        assert "amber: 1" in caught.value.message
        assert caught.value.field == "pool.max_live"
        assert "kill or pause" in (caught.value.fix or "")
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other

    in_pool(1, scenario)


def test_tenants_take_turns() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> list[str]:
        held = await pool.create(ONE)
        order: list[str] = []

        async def one(tenant: str) -> None:
            sandbox = await pool.create(ONE, metadata={"tenant": tenant})
            order.append(tenant)
            await sandbox.kill()

        tasks = [asyncio.ensure_future(one("greedy")) for _ in range(4)]
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(one("modest")) for _ in range(2)]
        await asyncio.sleep(0)
        await held.kill()
        await asyncio.gather(*tasks)
        return order

    assert in_pool(1, scenario) == ["greedy", "modest", "greedy", "modest", "greedy", "greedy"]


def test_a_sandbox_that_expires_frees_its_place() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        brief = await pool.create(ONE, timeout_s=0.05)
        other = await pool.create(ONE)
        assert (await other.get_info()).state == "running"
        with pytest.raises(SandboxMissingError):
            await pool.connect(brief.id)
        assert pool.num_held == 1

    in_pool(1, scenario)


def test_a_sandbox_that_dies_by_itself_frees_its_place_for_who_waits() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        await pool.create(ONE)
        waiting = asyncio.ensure_future(pool.create(ONE))
        await asyncio.sleep(0)
        await next(iter(inner.live)).kill()
        await waiting
        assert pool.num_held == 1

    in_pool(1, scenario)


def test_a_paused_sandbox_holds_no_place_and_waits_to_wake() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        sleeper = await pool.create(ONE)
        await sleeper.pause("filesystem")
        await sleeper.pause("filesystem")
        assert pool.num_held == 0
        other = await pool.create(ONE)
        with pytest.raises(CapacityError):
            await sleeper.resume()
        assert (await sleeper.get_info()).state == "paused"
        await other.kill()
        again = await pool.connect(sleeper.id)
        await sleeper.resume()
        assert again is sleeper
        assert pool.num_held == 1
        await sleeper.pause("filesystem")
        await sleeper.kill()
        assert pool.num_held == 0

    async def bounded(pool: PooledBackend, inner: SlowBackend) -> None:
        await scenario(pool, inner)
        inner.most_live = 1  # the memory backend counts sleeping ones as live

    in_pool(1, bounded, 0.2)


def test_a_sandbox_that_is_waking_keeps_its_place_while_others_wait() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        sleeper = await pool.create(ONE)
        (asleep,) = inner.live
        await sleeper.pause("filesystem")
        wake, begun, gate = asleep.resume, asyncio.Event(), asyncio.Event()

        async def wake_slowly() -> None:
            begun.set()
            await gate.wait()
            await wake()

        asleep.resume = wake_slowly  # type: ignore[method-assign]
        waking = asyncio.ensure_future(sleeper.resume())
        await begun.wait()
        waiting = asyncio.ensure_future(pool.create(ONE))
        await until(lambda: sum(pool.waiting.values()) == 1)
        await pool._refresh()
        assert pool.num_held == sum(pool.waiting.values()) == 1
        gate.set()
        await waking
        assert pool.num_held == sum(pool.waiting.values()) == 1
        await sleeper.kill()
        await waiting
        assert pool.num_held == 1

    in_pool(1, scenario)


def test_a_sandbox_that_is_killed_while_it_waits_to_wake_takes_no_place() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        sleeper = await pool.create(ONE)
        await sleeper.pause("filesystem")
        other = await pool.create(ONE)
        waking = asyncio.ensure_future(sleeper.resume())
        await until(lambda: sum(pool.waiting.values()) == 1)
        await sleeper.kill()
        await other.kill()
        with pytest.raises(SandboxMissingError):
            await waking
        assert pool.num_held == 0
        inner.most_live = 1  # the memory backend counts sleeping ones as live

    in_pool(1, scenario)


def test_a_cancelled_start_and_a_failed_start_give_their_places_back() -> None:
    async def scenario(pool: PooledBackend, inner: SlowBackend) -> None:
        inner.gate.clear()
        starting = asyncio.ensure_future(pool.create(ONE))
        await until(lambda: pool.num_held == 1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert pool.num_held == 0
        inner.gate.set()
        inner.failures = 1
        with pytest.raises(SandboxError, match="on purpose"):
            await pool.create(ONE)
        assert pool.num_held == 0

    in_pool(1, scenario)


def test_closing_refuses_who_waits() -> None:
    async def run() -> None:
        pool = PooledBackend(MemoryBackend(), 1)
        await pool.create(ONE)
        waiting = asyncio.ensure_future(pool.create(ONE))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(SandboxError, match="closed"):
            await waiting
        with pytest.raises(SandboxError, match="closed"):
            await pool.create(ONE)

    asyncio.run(run())


def test_a_sandbox_moves_from_pool_to_pool_and_so_does_its_place() -> None:
    async def run() -> None:
        source, target = PooledBackend(MemoryBackend(), 1), PooledBackend(MemoryBackend(), 1, 0.05)
        sandbox = await source.create(ONE, metadata={"tenant": "amber"})
        await sandbox.files.write("b.txt", "2")
        moved = await sandbox.migrate(target)
        assert (source.num_held, target.num_held) == (0, 1)
        assert await moved.files.read("b.txt") == b"2"
        again = await source.create(ONE)
        with pytest.raises(CapacityError):
            await again.migrate(target)
        assert (await again.get_info()).state == "running"
        assert source.num_held == 1
        await source.close()
        await target.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_pooled_sandbox_gives_the_results_of_its_backend(scenario: Any) -> None:
    async def run() -> Any:
        pool = PooledBackend(MemoryBackend(), 3)
        try:
            return await scenario(await pool.create(Template(FILES)))
        finally:
            await pool.close()

    assert asyncio.run(run()) == with_sandbox("memory", FILES, scenario)


class Room:
    """Three places, and who waits for them."""

    def __init__(self) -> None:
        self.held = 0
        self.line = WaitingLine(self._take, self.release)

    def _take(self, num: int) -> int | None:
        if self.held + num > 3:
            return None
        self.held += num
        return num

    def release(self, num: int) -> None:
        self.held -= num


class LineMachine(RuleBasedStateMachine):
    """Any order of asking, cancelling, timing out and giving back keeps the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.room = Room()
        self.waiting: list[tuple[asyncio.Task[int], str, int]] = []
        self.granted: list[int] = []
        self.served_since: dict[int, list[str]] = {}

    def teardown(self) -> None:
        for task, _, _ in self.waiting:
            task.cancel()
        self.turn()
        self.loop.close()

    def turn(self) -> None:
        """Lets the loop come to rest, and notes who got places."""

        async def idle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(idle())
        for entry in list(self.waiting):
            task, tenant, num = entry
            if not task.done():
                continue
            self.waiting.remove(entry)
            self.served_since.pop(id(task), None)
            if task.cancelled():
                # It may just have been served: then its tenant's turn is over, and others have theirs first.
                for other, same, _ in self.waiting:
                    if same == tenant:
                        self.served_since[id(other)] = []
            elif task.exception() is None:
                self.granted.append(num)
                for served in self.served_since.values():
                    served.append(tenant)

    @rule(tenant=st.sampled_from("abc"), num=st.integers(1, 3))
    def ask(self, tenant: str, num: int) -> None:
        async def begin() -> asyncio.Task[int]:
            return asyncio.ensure_future(self.room.line.wait(num, 1000.0, tenant))

        task = self.loop.run_until_complete(begin())
        self.waiting.append((task, tenant, num))
        self.served_since[id(task)] = []
        self.turn()

    @rule()
    def ask_for_no_time(self) -> None:
        async def brief() -> bool:
            try:
                await self.room.line.wait(1, 0.0, "d")
            except TimeoutError:
                return False
            return True

        if self.loop.run_until_complete(brief()):
            self.granted.append(1)
        self.turn()

    def give(self, num: int) -> None:
        self.room.release(num)
        self.room.line.serve()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiting))[0].cancel()
        self.turn()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        num = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        self.give(num)
        self.turn()

    @precondition(lambda self: self.granted and self.waiting)
    @rule(data=st.data())
    def give_back_and_cancel_at_once(self, data: st.DataObject) -> None:
        """The cancelled one may just have been served."""
        self.give(self.granted.pop())
        data.draw(st.sampled_from(self.waiting))[0].cancel()
        self.turn()

    @invariant()
    def never_more_than_there_are(self) -> None:
        assert 0 <= self.room.held <= 3

    @invariant()
    def what_is_held_is_what_was_granted(self) -> None:
        assert self.room.held == sum(self.granted)
        assert len(self.room.line) == len(self.waiting)

    @invariant()
    def nobody_is_passed_over(self) -> None:
        """While the first of a tenant waits, no other tenant is served twice."""
        first: dict[str, int] = {}
        for task, tenant, _ in self.waiting:
            first.setdefault(tenant, id(task))
        for tenant, task_id in first.items():
            served = self.served_since[task_id]
            if tenant not in served:
                assert all(served.count(other) <= 1 for other in set(served) - {"d"}), served


LineMachine.TestCase.settings = settings(stateful_step_count=25)
TestLine = LineMachine.TestCase


def test_a_refusal_is_for_whoever_is_next_alone() -> None:
    async def scenario() -> None:
        line = WaitingLine[int, int](lambda wanted: None, lambda given: None)
        waiting = [asyncio.ensure_future(line.wait(1, None)) for _ in range(2)]
        await asyncio.sleep(0)
        line.refuse(SandboxError("no"))
        with pytest.raises(SandboxError, match="no"):
            await waiting[0]
        assert len(line) == 1 and not waiting[1].done()
        line.refuse_all(SandboxError("closed"))
        with pytest.raises(SandboxError, match="closed"):
            await waiting[1]

    asyncio.run(scenario())


def test_a_line_serves_tenants_in_turns_and_each_in_order_and_a_large_wish_before_small_ones() -> None:
    async def run() -> list[tuple[str, int]]:
        room, served = Room(), list[tuple[str, int]]()
        room.held = 3

        async def ask(tenant: str, num: int) -> None:
            await room.line.wait(num, 60.0, tenant)
            served.append((tenant, num))

        rows = (("a", 1), ("a", 3), ("b", 2), ("a", 1), ("c", 1), ("b", 1))
        tasks = [asyncio.create_task(ask(*row)) for row in rows]
        for _ in range(30):
            await asyncio.sleep(0)
            room.held = max(0, room.held - 1)
            room.line.serve()
        await asyncio.gather(*tasks)
        return served

    assert asyncio.run(run()) == [("a", 1), ("b", 2), ("c", 1), ("a", 3), ("b", 1), ("a", 1)]
