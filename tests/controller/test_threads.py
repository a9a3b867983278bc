"""Parts in threads of this process: what a Handle of one promises."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from etude.controller.threads import ThreadExecutor
from etude.errors import PartLostError, SamplerError
from etude.protocols import Resources


@dataclass
class Part:
    """Computes, waits and fails on demand."""

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

    async def wait(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("cancelled")

    def fail(self) -> None:
        raise SamplerError("it does not work")

    def close(self) -> None:
        self.log.append("closed")


def test_a_part_answers_while_it_computes_and_computes_one_thing_after_another() -> None:
    async def body() -> None:
        executor = ThreadExecutor()
        handle = await executor.spawn(Part, resources=Resources(part="trainer"))
        part: Part = handle._part
        computing = [asyncio.ensure_future(handle.call("compute", name)) for name in ("a", "b")]
        await asyncio.to_thread(part.begun.wait, 20.0)
        answered_in = await handle.call("answer")
        assert part.log == []
        part.go_on.set()
        assert await asyncio.gather(*computing) == [part.made_in] * 2
        assert part.log == ["a", "b"]
        assert len({answered_in, part.made_in, threading.get_ident()}) == 3
        with pytest.raises(SamplerError, match="does not work"):
            await handle.call("fail")
        await executor.shutdown()
        await handle.stop()
        assert part.log == ["a", "b", "closed"]
        with pytest.raises(PartLostError, match="trainer"):
            await handle.call("answer")

    asyncio.run(body())


def test_a_killed_part_answers_nobody_and_what_waits_in_it_is_cancelled() -> None:
    async def body() -> None:
        executor = ThreadExecutor()
        handle = await executor.spawn(Part)
        part: Part = handle._part
        calls = [asyncio.ensure_future(handle.call(method)) for method in ("wait", "answer")]
        await asyncio.to_thread(part.begun.wait, 20.0)
        await calls[1]
        handle.kill()
        with pytest.raises(PartLostError, match="Part"):
            await calls[0]
        await asyncio.to_thread(handle._thread.join, 20.0)
        assert part.log == ["cancelled"]
        await executor.shutdown()
        assert part.log == ["cancelled"], "it is not closed: nothing of it is left"

    asyncio.run(body())


def test_a_cancelled_call_is_cancelled_in_the_part_and_the_part_goes_on() -> None:
    async def body() -> None:
        handle = await ThreadExecutor().spawn(Part)
        part: Part = handle._part
        waiting = asyncio.ensure_future(handle.call("wait"))
        await asyncio.to_thread(part.begun.wait, 20.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await handle.call("answer")
        assert part.log == ["cancelled"]
        await handle.stop()

    asyncio.run(body())


@pytest.mark.parametrize("first", ["kill", "cancel"])
def test_whoever_is_cancelled_while_the_part_is_killed_is_cancelled(first: str) -> None:
    async def body() -> None:
        executor = ThreadExecutor()
        handle = await executor.spawn(Part)
        part: Part = handle._part
        waiting = asyncio.ensure_future(handle.call("wait"))
        await asyncio.to_thread(part.begun.wait, 20.0)
        for end in (handle.kill, waiting.cancel) if first == "kill" else (waiting.cancel, handle.kill):
            end()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await executor.shutdown()

    asyncio.run(body())


def test_a_part_that_cannot_be_made_raises_and_leaves_no_thread() -> None:
    async def body() -> None:
        def make() -> Any:
            raise SamplerError("no room")

        before = threading.active_count()
        with pytest.raises(SamplerError, match="no room"):
            await ThreadExecutor().spawn(make)
        async with asyncio.timeout(60.0):
            while threading.active_count() > before:  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.01)

    asyncio.run(body())
