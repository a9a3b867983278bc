"""A run over clusters in network namespaces, with shaped links, latency, loss, an outage and a kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

pytest.importorskip("fastapi", reason="needs etude[serve]")

from benchmarks.clusters import Disturbances, Link, Model, play

from tests.controller.clusters.long_link import LongLink
from tests.controller.clusters.namespaces import missing


@pytest.mark.slow
@pytest.mark.foreign
def test_a_run_over_three_clusters_loses_and_repeats_nothing() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    played = play(2, Link(), 4, Disturbances(outage_s=5.0, away_s=1.0), Model())
    found = played.audit
    assert (found.steps, found.lost, found.repeated) == (4, 0, 0)
    assert found.max_lag <= 2
    assert set(found.by_cluster) <= {"cluster-1", "cluster-2"}
    assert played.counts["kept"] <= played.counts["given"]
    for fetched in played.weights_bytes:
        assert fetched <= played.full_bytes * 2 + played.delta_bytes * played.versions * 2


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To somebody who begins to listen there."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.01)


def test_a_long_link_is_late_and_keeps_the_order_of_what_it_carries() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        to_port = server.sockets[0].getsockname()[1]
        link = LongLink(0.05, 0.3, seed=1)
        taken = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = taken.sockets[0].getsockname()[1]
        taken.close()
        await taken.wait_closed()
        forwarding = asyncio.create_task(link.forward(port, "127.0.0.1", to_port))
        reader, writer = await connected(port)
        sent = bytes(range(256)) * 200
        began_s = time.monotonic()
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(60):
            assert await reader.read() == sent
        assert time.monotonic() - began_s >= 0.1, "a round trip"
        assert link.lost_segments > 0
        writer.close()
        forwarding.cancel()
        await asyncio.gather(forwarding, return_exceptions=True)
        server.close()

    asyncio.run(scenario())
