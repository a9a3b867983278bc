"""Periodic work of servers."""

from __future__ import annotations

import asyncio

import pytest

from etude.errors import StoreError
from etude.kit.tasks import sweeping


def test_it_sweeps_until_the_block_ends() -> None:
    asyncio.run(_sweep_twice())


async def _sweep_twice() -> None:
    swept = 0
    twice = asyncio.Event()

    async def sweep() -> None:
        nonlocal swept
        swept += 1
        if swept == 2:
            twice.set()

    async with sweeping(sweep, idle_s=0.1, most_s=15.0):
        await asyncio.wait_for(twice.wait(), 60)
    told = swept
    await asyncio.sleep(0.12)
    assert swept == told


def test_what_a_sweep_raises_is_not_lost() -> None:
    with pytest.raises(StoreError):
        asyncio.run(_sweep_once_and_fail())


async def _sweep_once_and_fail() -> None:
    failed = asyncio.Event()

    async def sweep() -> None:
        failed.set()
        raise StoreError("the store is gone")

    async with sweeping(sweep, idle_s=0.1, most_s=15.0):
        await asyncio.wait_for(failed.wait(), 60)
