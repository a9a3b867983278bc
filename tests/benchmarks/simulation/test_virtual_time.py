import asyncio

import pytest
from benchmarks.simulation.virtual_time import run_virtual
from hypothesis import given
from hypothesis import strategies as st


def test_a_year_passes_at_once() -> None:
    async def sleep() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    assert run_virtual(sleep()) == pytest.approx(365 * 86_400)


@given(st.lists(st.floats(0, 1e4, allow_nan=False), max_size=20))
def test_sleepers_wake_in_the_order_of_their_times(delays: list[float]) -> None:
    async def run() -> list[tuple[float, float]]:
        woken: list[tuple[float, float]] = []

        async def sleeper(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            woken.append((delay_s, asyncio.get_running_loop().time()))

        await asyncio.gather(*map(sleeper, delays))
        return woken

    woken = run_virtual(run())
    assert [delay for delay, _ in woken] == sorted(delays)
    assert all(abs(at - delay) < 1e-6 for delay, at in woken)


def test_what_another_thread_does_is_waited_for() -> None:
    async def run() -> str:
        return await asyncio.to_thread(lambda: "done")

    assert run_virtual(run()) == "done"
