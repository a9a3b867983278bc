import asyncio

import pytest
import torch

from etude.controller.local import LocalExecutor
from etude.errors import PartLostError
from etude.protocols import Resources


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


def test_calls_reach_the_part_in_order_and_its_answers_and_errors_come_back() -> None:
    async def run() -> None:
        handle = await LocalExecutor().spawn(Part, [], "a", step=2, resources=Resources(num_cpus=2))
        assert await handle.call("add", 3, offset=1) == 7
        assert await handle.call("add_later", 1) == 9
        with pytest.raises(ValueError, match="as raised"):
            await handle.call("fail")

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
        executor = LocalExecutor()
        alone = await executor.spawn(Counting)
        handle = await executor.spawn(Counting, resources=Resources(num_cpus=before + 1))
        assert await handle.call("threads") == before + 1
        assert await alone.call("threads") == before
        with pytest.raises(ValueError, match="as raised"):
            await handle.call("fail")
        assert torch.get_num_threads() == before

    asyncio.run(run())


def test_a_part_that_was_killed_answers_nobody_any_more() -> None:
    async def run() -> None:
        class Waiting(Part):
            async def wait(self) -> None:
                await asyncio.Event().wait()

        log: list[str] = []
        handle = await LocalExecutor().spawn(Waiting, log, "a", resources=Resources(part="trainer"))
        waiting = asyncio.ensure_future(handle.call("wait"))
        await asyncio.sleep(0)
        handle.kill()
        with pytest.raises(PartLostError, match="trainer: was killed"):
            await waiting
        with pytest.raises(PartLostError, match="trainer: was killed"):
            await handle.call("add", 1)
        await handle.stop()
        assert log == [], "what was killed closes nothing"

    asyncio.run(run())


def test_cancelling_a_call_is_no_loss_of_the_part() -> None:
    async def run() -> None:
        handle = await LocalExecutor().spawn(Part, [], "a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await handle.call("add_later", 1)
        assert await handle.call("add", 1) == 1

    asyncio.run(run())


@pytest.mark.parametrize("first", ["kill", "cancel"])
def test_whoever_is_cancelled_while_the_part_is_killed_is_cancelled(first: str) -> None:
    async def run() -> None:
        class Waiting(Part):
            async def wait(self) -> None:
                await asyncio.Event().wait()

        handle = await LocalExecutor().spawn(Waiting, [], "a")
        waiting = asyncio.ensure_future(handle.call("wait"))
        await asyncio.sleep(0)
        for end in (handle.kill, waiting.cancel) if first == "kill" else (waiting.cancel, handle.kill):
            end()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
