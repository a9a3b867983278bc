"""Background tasks: errors are reported, and none outlives `close`."""

from __future__ import annotations

import asyncio
import logging

import pytest

from etude.kit.tasks import (
    Changes,
    Tasks,
    end_tasks,
    finish_all,
    finish_despite_cancel,
    start_watched,
    unless,
)


async def fail() -> None:
    """Raises KeyError."""
    raise KeyError("lost")


async def never() -> None:
    """Does not end by itself."""
    await asyncio.Event().wait()


def test_a_task_leaves_the_set_when_it_ends_and_its_result_can_be_awaited() -> None:
    async def run() -> None:
        tasks = Tasks()
        task = tasks.start(asyncio.sleep(0, "done"))
        assert (len(tasks), list(tasks)) == (1, [task])
        assert await task == "done"
        await asyncio.sleep(0)
        assert not tasks

    asyncio.run(run())


def test_an_error_is_reported_and_a_cancellation_is_none() -> None:
    async def run() -> list[BaseException]:
        errors: list[BaseException] = []
        tasks = Tasks(on_error=errors.append)
        tasks.start(fail())
        tasks.start(never())
        await asyncio.sleep(0)
        await tasks.close()
        return errors

    (error,) = asyncio.run(run())
    assert isinstance(error, KeyError)


def test_an_error_that_nobody_awaits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks = Tasks()
        tasks.start(fail())
        await tasks.wait()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "never retrieved" in caplog.text


def test_closing_awaits_what_tidies_up_and_what_begins_meanwhile() -> None:
    async def run() -> list[str]:
        tasks, seen = Tasks(), list[str]()

        async def late() -> None:
            try:
                await never()
            finally:
                seen.append("late")

        async def tidy() -> None:
            try:
                await never()
            finally:
                tasks.start(late())
                await asyncio.sleep(0.01)
                seen.append("tidied")

        tasks.start(tidy())
        await asyncio.sleep(0)
        await tasks.close()
        assert not tasks
        return seen

    assert asyncio.run(run()) == ["tidied", "late"]


def test_waiting_ends_with_its_time() -> None:
    async def run() -> None:
        tasks = Tasks()
        tasks.start(never())
        await tasks.wait(timeout_s=0.01)
        assert len(tasks) == 1
        await tasks.close()

    asyncio.run(run())


def test_a_watched_task_gives_its_error_to_all_who_wait_and_is_not_logged_for_want_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        errors: list[BaseException] = []
        task = start_watched(fail(), errors.append)
        both = await asyncio.gather(asyncio.shield(task), asyncio.shield(task), return_exceptions=True)
        assert [type(error) for error in both] == [KeyError, KeyError]
        assert len(errors) == 1
        start_watched(fail())
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert not caplog.text


def test_a_cancelled_caller_waits_for_what_must_not_stop_halfway() -> None:
    async def run() -> bool:
        done = False

        async def work() -> None:
            nonlocal done
            await asyncio.sleep(0.01)
            done = True

        caller = asyncio.create_task(finish_despite_cancel(work()))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        return done

    assert asyncio.run(run())


def test_tasks_that_are_ended_have_tidied_up_and_raise_nothing() -> None:
    async def run() -> list[str]:
        seen: list[str] = []

        async def tidy() -> None:
            try:
                await never()
            finally:
                await asyncio.sleep(0.01)
                seen.append("tidied")
                raise KeyError

        tasks = [asyncio.ensure_future(tidy()), asyncio.ensure_future(tidy())]
        await asyncio.sleep(0)
        await end_tasks(*tasks)
        await end_tasks()
        return seen

    assert asyncio.run(run()) == ["tidied", "tidied"]


def test_all_is_brought_to_its_end_before_the_first_failure_is_raised() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0.001 * number)
        ended.append(number)
        if number in (1, 2):
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        asyncio.run(finish_all(work(number) for number in range(4)))
    assert ended == [0, 1, 2, 3]


def test_work_gives_its_result_unless_something_else_comes_first() -> None:
    async def run() -> None:
        error, stopped = ValueError("over"), asyncio.Event()

        async def work() -> None:
            try:
                await never()
            finally:
                await asyncio.sleep(0)
                stopped.set()

        assert await unless(asyncio.sleep(0, "done"), never(), error) == "done"
        with pytest.raises(KeyError, match="lost"):
            await unless(fail(), never(), error)
        with pytest.raises(ValueError, match="over"):
            await unless(work(), asyncio.sleep(0), error)
        assert stopped.is_set()

    asyncio.run(run())


def test_all_who_wait_for_a_change_look_at_each_until_it_is_theirs() -> None:
    async def run() -> None:
        changes, number = Changes(), 0
        waiting = [asyncio.ensure_future(changes.until(lambda n=n: number >= n)) for n in (0, 1, 2)]
        for number in (0, 1, 2):
            changes.notify()
            await asyncio.sleep(0.01)
            assert [one.done() for one in waiting] == [number >= n for n in (0, 1, 2)]

    asyncio.run(run())
