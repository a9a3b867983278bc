"""Sessions that wait for tools move to the least loaded engine."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from etude.controller.throughput import part_seconds
from etude.environment.runners import EnvironmentTimes
from etude.errors import PrefixMissError
from tests.controller.remote.building import Fleet, request, sample, until


def homes(made: Fleet) -> dict[str, int]:
    """Sessions that each engine holds."""
    routed: Any = made.fleet._routed  # type: ignore[reportPrivateUsage]
    return {name: len(replica.sessions) for name, replica in routed.router.replicas.items()}


def test_siblings_begin_where_their_prefix_is_and_a_waiting_session_moves_to_the_free_engine(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        made = Fleet(tmp_path)
        fleet = made.fleet
        await fleet.start()
        await made.serve(1)
        fleet.open("waits")
        first = await sample(fleet, request("waits"))
        for number in range(4):
            fleet.open(f"busy{number}", "waits")
        assert sorted(homes(made).values()) == [0, 5], "all where the prefix is"
        busy = [
            asyncio.create_task(sample(fleet, request(f"busy{number}", max_tokens=400)))
            for number in range(4)
        ]
        await asyncio.sleep(0)  # they are routed
        parts: Any = SimpleNamespace(
            service=fleet, environment=SimpleNamespace(times=EnvironmentTimes(num_moved=2))
        )
        assert part_seconds(parts)["sessions_moved"] == 2.0, "workers' own count as well"
        with pytest.raises(PrefixMissError):
            await sample(fleet, request("waits", 1, prefix_digest=first[-1].prefix_digest))
        assert fleet.num_moved == 1
        assert part_seconds(parts)["sessions_moved"] == 3.0
        whole = np.concatenate([np.arange(5), *(chunk.tokens for chunk in first)]).astype(np.int32)
        again = await sample(fleet, request("waits", 2, suffix=whole))
        assert again[-1].finish == "length"
        assert sorted(homes(made).values()) == [1, 4]
        await until(lambda: cast(int, fleet.counters.decode_tokens) > 0)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await fleet.shutdown()

    asyncio.run(run())
