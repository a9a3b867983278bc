"""Engines that take their weights from a store."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.config import WeightsConfig
from etude.errors import WeightUpdateError
from etude.inference import EngineService
from etude.weights import MemoryWeights, StoreWeights, Subscriber, WeightStore, open_weights
from tests.inference.builders import Client, empty_engine
from tests.model.builders import small_model
from tests.weights.stores import FAST, failing_store, version_at

_LIMIT_S = 60.0


def _run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, _LIMIT_S))


def _weights(step: int) -> dict[str, Tensor]:
    model = small_model(1)
    return {name: p.detach() + 1e-3 * step for name, p in model.named_parameters()}


def test_a_request_in_flight_survives_a_swap_to_a_delta(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))

    async def body() -> None:
        with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
            async with EngineService(empty_engine(), subscriber.fetch, None) as service:
                first = publisher.publish(version_at(0), _weights(0))
                await service.stage(first)
                await service.activate(first.version)
                second = publisher.publish(version_at(1), _weights(1))
                client, arrived = Client("s", 0), asyncio.Event()

                async def decode() -> None:
                    service.open("s")
                    async for chunk in service.stream(
                        client.request([2, 3, 4], max_tokens=40, streaming=True)
                    ):
                        client.take(chunk)
                        arrived.set()

                decoding = asyncio.create_task(decode())
                await arrived.wait()
                await service.stage(second)
                await service.activate(second.version)
                await decoding
                assert service.current() == second.version
                assert sum(client.sampled) == 40
                for name, parameter in service.engine.model.named_parameters():
                    assert torch.equal(parameter, _weights(1)[name])

    _run(body())
    assert (subscriber.counters.deltas, subscriber.counters.fallbacks) == (1, 0)


def test_what_is_served_stays_when_the_next_version_cannot_be_had(tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    subscriber = Subscriber(store)

    async def body() -> None:
        with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
            async with EngineService(empty_engine(), subscriber.fetch, None) as service:
                first = publisher.publish(version_at(0), _weights(0))
                await service.stage(first)
                await service.activate(first.version)
                second = publisher.publish(version_at(1), _weights(1))
                publisher.flush()
                folder.flip = {"files"}
                with pytest.raises(WeightUpdateError):
                    await service.stage(second)
                assert service.current() == first.version
                folder.flip = set()
                await service.stage(second)
                await service.activate(second.version)
                assert service.current() == second.version

    _run(body())


@pytest.mark.parametrize("kind", ["memory", "store", "read_url"])
def test_a_run_opens_the_ends_that_it_asks_for(kind: str, tmp_path: Path) -> None:
    config = {
        "memory": WeightsConfig(),
        "store": WeightsConfig(url=str(tmp_path)),
        "read_url": WeightsConfig(url=str(tmp_path), read_url=f"file://{tmp_path}"),
    }[kind]
    with open_weights(config) as (publisher, fetch):
        assert isinstance(publisher, MemoryWeights if kind == "memory" else StoreWeights)
        manifest = publisher.publish(version_at(0), _weights(0))
        for name, tensor in fetch(manifest).items():
            assert torch.equal(tensor, _weights(0)[name])
    assert (tmp_path / "commits").is_dir() == (kind != "memory")
