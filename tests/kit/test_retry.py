"""Retries: growing pauses, and when to give up."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from etude.kit.retry import Backoff, retry, retry_async


class Calls:
    """Raises these errors, one each time, then returns 7."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        if self._errors:
            raise self._errors.pop(0)
        return 7

    async def wait(self) -> int:
        """The same, awaited."""
        return self()


def test_pauses_grow_up_to_the_longest() -> None:
    backoff = Backoff(base_s=1.0, most_s=5.0)
    assert list(itertools.islice(backoff.pauses(), 5)) == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert Backoff(base_s=1.0, most_s=60.0).pause_s(10**6) == 60.0


def test_attempts_count_all_calls() -> None:
    assert list(Backoff(base_s=0.5, factor=4.0, attempts=3).pauses()) == [0.5, 2.0]
    assert list(Backoff(attempts=1).pauses()) == []


def test_the_last_pause_ends_with_the_time_that_is_allowed() -> None:
    pauses = Backoff(base_s=60.0, within_s=0.05).pauses()
    assert 0 < next(pauses) <= 0.05
    time.sleep(0.06)
    assert next(pauses, None) is None


def test_jitter_only_shortens_a_pause() -> None:
    pauses = {Backoff(base_s=1.0, jitter=0.5).pause_s(1) for _ in range(50)}
    assert len(pauses) > 1
    assert all(0.5 <= pause <= 1.0 for pause in pauses)


def test_a_call_is_made_again_until_it_answers() -> None:
    slept: list[float] = []
    calls = Calls(OSError(), OSError())
    assert retry(calls, OSError, Backoff(base_s=0.1), sleep=slept.append) == 7
    assert (calls.count, slept) == (3, [0.1, 0.2])


def test_the_last_failure_is_raised_and_others_at_once() -> None:
    last = OSError("last")
    with pytest.raises(OSError, match="last"):
        retry(Calls(OSError("first"), last), OSError, Backoff(base_s=0.0, attempts=2))
    calls = Calls(KeyError())
    with pytest.raises(KeyError):
        retry(calls, OSError, Backoff(base_s=0.0))
    assert calls.count == 1


def test_some_of_the_failures_are_raised_at_once() -> None:
    for call in (
        lambda calls: retry(calls, OSError, Backoff(base_s=0.0), unless=TimeoutError),
        lambda calls: asyncio.run(retry_async(calls.wait, OSError, Backoff(base_s=0.0), unless=TimeoutError)),
    ):
        calls = Calls(ConnectionError(), TimeoutError())
        with pytest.raises(TimeoutError):
            call(calls)
        assert calls.count == 2


def test_a_caller_sees_each_failure_and_may_wait_longer_or_give_up() -> None:
    seen: list[float | None] = []
    slept: list[float] = []

    def longer(failure: OSError, pause_s: float | None) -> float:
        del failure
        seen.append(pause_s)
        return 3.0

    with pytest.raises(OSError):
        retry(
            Calls(OSError(), OSError()),
            OSError,
            Backoff(base_s=1.0, attempts=2),
            on_failure=longer,
            sleep=slept.append,
        )
    assert (seen, slept) == ([1.0, None], [3.0])

    def give_up(failure: OSError, pause_s: float | None) -> None:
        raise RuntimeError("closed") from failure

    with pytest.raises(RuntimeError, match="closed"):
        retry(Calls(OSError()), OSError, Backoff(), on_failure=give_up)


def test_an_awaited_call_is_made_again_the_same_way() -> None:
    calls = Calls(OSError(), OSError())
    assert asyncio.run(retry_async(calls.wait, OSError, Backoff(base_s=0.0, attempts=3))) == 7
    with pytest.raises(OSError):
        asyncio.run(retry_async(Calls(OSError()).wait, OSError, Backoff(attempts=1)))
