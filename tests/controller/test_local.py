"""Parts in this process, on the event loop or in threads: the contract of their Handle."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from etude.controller.local import LocalExecutor, LocalHandle
from etude.errors import PartLostError, SamplerError
from etude.protocols import Resources

BOTH = pytest.mark.parametrize("apart", [False, True])


async def made(apart: bool, factory: Any, *arguments: Any, name: str = "") -> LocalHandle[Any]:
    """A part, in the caller's thread or apart."""
    if not apart:
        return LocalHandle(factory(*arguments), name=name)
    return await LocalExecutor().spawn(factory, *arguments, resources=Resources(part=name))


class Part:
    """Counts what is asked of it."""

    def __init__(self, log: list[str], name: str, step: int = 1) -> None:
        self.log, self.name, self.total, self._step = log, name, 0, step

    def add(self, times: int, *, offset: int = 0) -> int:
        self.total += times * self._step + offset
        return self.total

    async def add_later(self, times: int) -> int:
        await asyncio.sleep(0)
        return self.add(times)

    def fail(self) -> None:
        raise ValueError("as raised")

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.log.append(f"{self.name} closed")


@BOTH
def test_calls_reach_the_part_in_order_and_its_answers_and_errors_come_back(apart: bool) -> None:
    async def run() -> None:
        handle = await made(apart, Part, [], "a", 2)
        assert await handle.call(Part.add, 3, offset=1) == 7
        assert await handle.call(Part.add_later, 1) == 9
        with pytest.raises(ValueError, match="as raised"):
            await handle.call(Part.fail)

    asyncio.run(run())


def test_what_was_made_last_is_stopped_first_and_once() -> None:
    async def run() -> list[str]:
        log: list[str] = []
        executor = LocalExecutor()
        await executor.spawn(Part, log, "a")
        await executor.spawn(dict)
        await executor.spawn(Part, log, "b")
        await executor.shutdown()
        await executor.shutdown()
        return log

    assert asyncio.run(run()) == ["b closed", "a closed"]


def test_a_part_computes_with_its_own_number_of_threads() -> None:
    class Counting:
        def threads(self) -> int:
            return torch.get_num_threads()

        def fail(self) -> None:
            raise ValueError("as raised")

    async def run() -> None:
        before = torch.get_num_threads()
        alone, handle = LocalHandle(Counting()), LocalHandle(Counting(), before + 1)
        assert await handle.call(Counting.threads) == before + 1
        assert await alone.call(Counting.threads) == before
        with pytest.raises(ValueError, match="as raised"):
            await handle.call(Counting.fail)
        assert torch.get_num_threads() == before

    asyncio.run(run())


@BOTH
def test_a_part_that_was_killed_answers_nobody_any_more(apart: bool) -> None:
    async def run() -> None:
        class Waiting(Part):
            async def wait(self) -> None:
                await asyncio.Event().wait()

        log: list[str] = []
        handle = await made(apart, Waiting, log, "a", name="trainer")
        waiting = asyncio.ensure_future(handle.call(Waiting.wait))
        await asyncio.sleep(0)
        handle.kill()
        with pytest.raises(PartLostError, match="trainer: was killed"):
            await waiting
        with pytest.raises(PartLostError, match="trainer: was killed"):
            await handle.call(Part.add, 1)
        await handle.stop()
        assert log == (["a closed"] if apart else []), "a part apart may have tasks in this loop"

    asyncio.run(run())


@BOTH
def test_cancelling_a_call_is_no_loss_of_the_part(apart: bool) -> None:
    async def run() -> None:
        handle = await made(apart, Part, [], "a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await handle.call(Part.add_later, 1)
        assert await handle.call(Part.add, 1) == 1

    asyncio.run(run())


@BOTH
@pytest.mark.parametrize("first", ["kill", "cancel"])
def test_whoever_is_cancelled_while_the_part_is_killed_is_cancelled(first: str, apart: bool) -> None:
    async def run() -> None:
        class Waiting(Part):
            async def wait(self) -> None:
                await asyncio.Event().wait()

        handle = await made(apart, Waiting, [], "a")
        waiting = asyncio.ensure_future(handle.call(Waiting.wait))
        await asyncio.sleep(0)
        for end in (handle.kill, waiting.cancel) if first == "kill" else (waiting.cancel, handle.kill):
            end()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


@dataclass
class Computing:
    """Computes for as long as it is told to."""

    made_in: int = field(default_factory=threading.get_ident)
    go_on: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    log: list[str] = field(default_factory=list[str])

    def compute(self, name: str) -> int:
        self.begun.set()
        assert self.go_on.wait(60.0)
        self.log.append(name)
        return threading.get_ident()

    async def answer(self) -> int:
        return threading.get_ident()

    def close(self) -> None:
        self.log.append(f"closed in {threading.get_ident()}")


def test_a_part_apart_answers_while_it_computes_and_computes_one_thing_after_another() -> None:
    async def run() -> None:
        executor = LocalExecutor()
        handle = await executor.spawn(Computing, resources=Resources(part="trainer"))
        part = handle.part
        computing = [asyncio.ensure_future(handle.call(Computing.compute, name)) for name in ("a", "b")]
        await asyncio.to_thread(part.begun.wait, 20.0)
        assert await handle.call(Computing.answer) == threading.get_ident()
        assert part.log == []
        part.go_on.set()
        assert await asyncio.gather(*computing) == [part.made_in] * 2
        assert part.log == ["a", "b"]
        assert part.made_in != threading.get_ident()
        await executor.shutdown()
        await handle.stop()
        assert part.log == ["a", "b", f"closed in {part.made_in}"]
        with pytest.raises(PartLostError, match="trainer"):
            await handle.call(Computing.answer)

    asyncio.run(run())


def test_nobody_waits_for_what_a_killed_part_computes_and_nothing_follows_it() -> None:
    async def run() -> None:
        executor = LocalExecutor()
        handle = await executor.spawn(Computing)
        part = handle.part
        calls = [asyncio.ensure_future(handle.call(Computing.compute, name)) for name in ("a", "b")]
        await asyncio.to_thread(part.begun.wait, 20.0)
        handle.kill()
        for call in calls:
            with pytest.raises(PartLostError, match="Computing"):
                await call
        await executor.shutdown()
        part.go_on.set()
        thread = handle._compute
        assert thread is not None
        await asyncio.to_thread(thread.shutdown)
        assert part.log == ["a"], "neither the next call nor its close"

    asyncio.run(run())


def test_a_part_apart_that_cannot_be_made_raises_and_leaves_no_thread() -> None:
    async def run() -> None:
        def make() -> Any:
            raise SamplerError("no room")

        before = threading.active_count()
        with pytest.raises(SamplerError, match="no room"):
            await LocalExecutor().spawn(make)
        async with asyncio.timeout(60.0):
            while threading.active_count() > before:  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.01)

    asyncio.run(run())
