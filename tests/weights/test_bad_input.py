"""Faults of a store, a disk, a clock or a replica are reported, contained and recovered from."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
import torch

from etude.errors import StoreError, WeightUpdateError
from etude.inference import EngineService
from etude.weights import StoreWeights, Subscriber, WeightStore
from etude.weights.folders import DirectoryFolder
from etude.weights.writer import StoreWriter
from tests.inference.builders import empty_engine
from tests.model.builders import small_model
from tests.training.test_checkpoint_keeping import filled
from tests.training.test_checkpoint_keeping import small_disk as small_disk
from tests.weights.stores import FAST, BeatingFolder, assert_is, failing_store, tensors_at, version_at

_LONG_AGO, _FAR_OFF = 86_400.0, 4_102_444_800.0
"""1970 and 2100, as a machine with a wrong clock might write them."""


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no file system that lets nobody write")
@pytest.mark.parametrize("place", ["/sys/etude", "/proc/etude"])
def test_a_store_without_rights_is_said_before_anything_is_published(place: str) -> None:
    with pytest.raises(StoreError, match=r"weights\.url: permission denied") as caught:
        StoreWeights(WeightStore.open(place), FAST)
    assert "grant the permission" in (caught.value.fix or "")


def test_a_replica_that_may_only_read_reads(tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    folder.refuse_writes = {"pins", "wanted"}
    subscriber = Subscriber(store)
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        for step in range(3):
            assert_is(step, subscriber.fetch(publisher.publish(version_at(step), tensors_at(step))))
        assert subscriber.counters.unpinned == 3
        folder.flip = {"files"}
        with pytest.raises(WeightUpdateError, match="cannot be fetched"):
            subscriber.fetch(publisher.publish(version_at(3), tensors_at(3)))
    assert subscriber.version is not None and subscriber.version.step == 2


def test_a_full_disk_keeps_the_last_version_and_takes_the_next_when_there_is_room(small_disk: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(small_disk)), wait_s=0.1, pin_s=0)
    large = {"w": torch.randn(20_000)}
    with StoreWeights(WeightStore.open(str(small_disk)), FAST) as publisher:
        first = publisher.publish(version_at(0), large)
        publisher.flush()
        assert torch.equal(subscriber.fetch(first)["w"], large["w"])
        filler = filled(small_disk, 16384)
        lost = publisher.publish(version_at(1), {"w": torch.randn(20_000)})
        with pytest.raises(StoreError, match="No space left") as caught:
            publisher.flush()
        assert "free some space" in (caught.value.fix or "")
        with pytest.raises(WeightUpdateError, match="did not appear"):
            subscriber.fetch(lost)
        filler.unlink()
        last = {"w": large["w"] + 1}
        second = publisher.publish(version_at(2), last)
        publisher.flush()
        assert torch.equal(subscriber.fetch(second)["w"], last["w"])
    assert [commit.version.step for commit in WeightStore.open(str(small_disk)).commits().values()] == [0, 2]


@pytest.mark.parametrize("clock", [_LONG_AGO, _FAR_OFF])
def test_clocks_of_other_machines_do_not_matter(clock: float, tmp_path: Path) -> None:
    """Leases, pins and retention go by what changes and by one's own monotonic clock."""

    def skew() -> None:
        for path in tmp_path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # removed by the publisher meanwhile
                os.utime(path, (clock, clock))

    store = WeightStore.open(str(tmp_path))
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    with StoreWeights(store, FAST) as publisher:
        subscriber.fetch(publisher.publish(version_at(0), tensors_at(0)))
        for step in range(1, 10):
            skew()
            manifest = publisher.publish(version_at(step), tensors_at(step))
        publisher.flush()
        skew()
        with pytest.raises(StoreError, match="another writer"):
            StoreWriter(WeightStore(BeatingFolder(DirectoryFolder(tmp_path))), FAST)
        assert min(store.commits()) == 2, "the pinned chain stays"
        assert_is(9, subscriber.fetch(manifest))
    skew()
    with contextlib.closing(StoreWriter(store, FAST)) as writer:
        assert writer.next_sequence == 11


def test_a_replica_of_another_architecture_refuses_and_serves_what_it_has(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    own, wider = (
        {name: p.detach() for name, p in small_model(1, **changes).named_parameters()}
        for changes in ({}, {"expert_size": 48})
    )

    async def body() -> None:
        with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
            async with EngineService(empty_engine(), subscriber.fetch, None) as service:
                first = publisher.publish(version_at(0), own)
                await service.stage(first)
                await service.activate(first.version)
                for step, other in enumerate((wider, dict(list(own.items())[:-1])), 1):
                    wrong = publisher.publish(version_at(step), other)
                    with pytest.raises(WeightUpdateError, match=r"shape differs|not those") as caught:
                        await service.stage(wrong)
                    assert caught.value.field in {*own, "tensors"}
                    assert service.current() == first.version
                again = publisher.publish(version_at(3), own)
                await service.stage(again)
                await service.activate(again.version)
                assert service.current() == again.version

    asyncio.run(asyncio.wait_for(body(), 60.0))
