"""What a trainer publishes reaches subscribers bit for bit, whatever happens on the way."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.errors import StoreError, WeightUpdateError
from etude.records import ADAPTER_PREFIX, PolicyVersion, WeightManifest
from etude.weights import Subscriber, describe_tensors
from etude.weights.commits import commit_name
from etude.weights.disk import DiskTensors
from etude.weights.publisher import StoreWeights
from etude.weights.relay import Relay
from etude.weights.store import WeightStore, split_url
from tests.training.test_checkpoint_keeping import filled
from tests.training.test_checkpoint_keeping import small_disk as small_disk
from tests.weights.stores import FAST, FailingFolder, assert_is, failing_store, tensors_at, version_at


def _publish(publisher: StoreWeights, steps: range) -> list[WeightManifest]:
    manifests = [publisher.publish(version_at(step), tensors_at(step)) for step in steps]
    publisher.flush()
    return manifests


def test_versions_reach_a_subscriber_by_deltas(tmp_path: Path) -> None:
    store = WeightStore.open(str(tmp_path))
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    with StoreWeights(store, FAST) as publisher:
        for step in range(7):
            manifest = publisher.publish(version_at(step), tensors_at(step))
            assert manifest.version.digest and split_url(manifest.url)[1] == step + 1
            assert (None if manifest.base is None else manifest.base.step) == (step - 1 if step else None)
            assert_is(step, subscriber.fetch(manifest))
    assert (subscriber.counters.snapshots, subscriber.counters.deltas) == (1, 6)
    assert subscriber.counters.fallbacks == 0
    assert subscriber.version is not None and subscriber.version.step == 6


def test_publishing_copies_and_the_newest_version_is_at_hand(tmp_path: Path) -> None:
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        for step in range(3):
            tensors = tensors_at(step)
            manifest = publisher.publish(version_at(step), tensors)
            for tensor in tensors.values():
                tensor.zero_()
            assert_is(step, publisher.fetch(manifest))
        publisher.flush()
        assert_is(2, Subscriber(WeightStore.open(str(tmp_path))).fetch(manifest))
        with pytest.raises(WeightUpdateError, match="newest"):
            publisher.fetch(replace(manifest, version=version_at(1)))


def test_copies_on_disk_give_the_files_and_versions_of_copies_in_memory(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    found: list[list[WeightManifest]] = []
    for name, directory in (("memory", None), ("disk", scratch)):
        store = WeightStore.open(str(tmp_path / name))
        with StoreWeights(store, FAST, scratch=directory) as publisher:
            manifests: list[WeightManifest] = []
            for step in range(6):
                tensors = tensors_at(step)
                manifests.append(publisher.publish(version_at(step), tensors))
                for tensor in tensors.values():
                    tensor.zero_()  # they are copied
            assert_is(5, publisher.fetch(manifests[-1]))
            publisher.flush()
            subscriber = Subscriber(WeightStore.open(str(tmp_path / name)))
            assert_is(5, subscriber.fetch(manifests[-1]))
        found.append([replace(one, url="") for one in manifests])
    assert found[0] == found[1]
    sizes = [
        sorted(file.stat().st_size for file in (tmp_path / name / "files").rglob("*.etude"))
        for name in ("memory", "disk")
    ]
    assert sizes[0] == sizes[1]
    assert scratch.is_dir() and not list(scratch.iterdir())


def test_a_scratch_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with StoreWeights(
        WeightStore.open(str(tmp_path / "store")), FAST, scratch=tmp_path / "file"
    ) as publisher:
        with pytest.raises(StoreError, match=r"weights\.scratch"):
            publisher.publish(version_at(0), tensors_at(0))
        assert not Subscriber(WeightStore.open(str(tmp_path / "store"))).counters.snapshots


def test_a_failed_upload_leaves_no_third_version_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    made: list[weakref.ref[DiskTensors]] = []

    class Counted(DiskTensors):
        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            made.append(weakref.ref(self))
            gc.collect()
            counts.append(sum(one() is not None for one in made))

    monkeypatch.setattr("etude.weights.publisher.DiskTensors", Counted)
    store, folder = failing_store(tmp_path / "store")
    with StoreWeights(store, FAST, scratch=tmp_path / "scratch") as publisher:
        _publish(publisher, range(2))
        folder.refuse_writes = {"files"}
        with pytest.raises(StoreError):
            _publish(publisher, range(2, 3))
        folder.refuse_writes = set()
        _publish(publisher, range(3, 5))
    assert max(counts) == 2


def test_a_version_on_disk_is_read_once_for_its_snapshot_and_twice_for_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Counted(DiskTensors):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    monkeypatch.setattr("etude.weights.publisher.DiskTensors", Counted)
    store = WeightStore.open(str(tmp_path / "store"))
    with StoreWeights(store, FAST, scratch=tmp_path / "scratch") as publisher:
        _publish(publisher, range(2))
    names = sorted(tensors_at(0))
    assert sorted(read) == sorted(3 * names)  # the first whole, the second and what it is compared with


def test_a_version_is_waited_for_while_it_is_uploaded(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)), wait_s=60)
    manifest = describe_tensors(version_at(0), tensors_at(0), WeightStore.open(str(tmp_path)).version_url(1))
    found = []
    thread = threading.Thread(target=lambda: found.append(subscriber.fetch(manifest)))
    thread.start()
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        publisher.publish(version_at(0), tensors_at(0))
    thread.join()
    assert_is(0, found[0])


def test_missed_versions_are_made_up_for(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        manifests = _publish(publisher, range(4))
        assert_is(0, subscriber.fetch(manifests[0]))
        assert_is(3, subscriber.fetch(manifests[3]))
        assert_is(1, subscriber.fetch(manifests[1]))


def test_whoever_comes_back_after_its_chain_was_collected_takes_a_snapshot(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)), pin_s=0)
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        (first,) = _publish(publisher, range(1))
        subscriber.fetch(first)
        later = _publish(publisher, range(1, 12))
        assert_is(11, subscriber.fetch(later[-1]))
        with pytest.raises(WeightUpdateError):
            subscriber.fetch(later[0])
        assert subscriber.version is not None and subscriber.version.step == 11
    assert subscriber.counters.snapshots == 2


@pytest.mark.parametrize("fault", ["flip", "lose"])
def test_a_delta_that_does_not_serve_is_replaced_by_the_snapshot(fault: str, tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    subscriber = Subscriber(store)
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        manifests = _publish(publisher, range(5))
        assert_is(3, subscriber.fetch(manifests[3]))
        names = [file.name for file in store.commits()[5].delta]
        setattr(folder, fault, set(names))
        assert_is(4, subscriber.fetch(manifests[4]))
    assert subscriber.counters.fallbacks == 1
    assert subscriber.counters.last_fallback


def test_a_base_that_was_changed_in_memory_is_noticed(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        manifests = _publish(publisher, range(2))
        held = subscriber.fetch(manifests[0])
        held["frozen"].zero_()
        assert_is(1, subscriber.fetch(manifests[1]))
    assert "these weights differ" in subscriber.counters.last_fallback


def test_damage_on_the_way_is_fetched_again(tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    folder.flip, folder.once = {"full"}, True
    with StoreWeights(WeightStore.open(str(tmp_path)), replace(FAST, shard_bytes=1 << 20)) as publisher:
        (manifest,) = _publish(publisher, range(1))
        assert_is(0, Subscriber(store).fetch(manifest))


def test_a_damaged_snapshot_is_asked_for_anew_and_comes_with_the_next_version(tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    subscriber = Subscriber(store)
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        (first,) = _publish(publisher, range(1))
        folder.flip = {"full"}
        with pytest.raises(WeightUpdateError, match="cannot be fetched"):
            subscriber.fetch(first)
        assert subscriber.version is None
        folder.flip = {"files/000000000001"}
        (second,) = _publish(publisher, range(1, 2))
        assert_is(1, subscriber.fetch(second))
        assert store.folder.list("wanted") == []


def test_what_is_held_stays_when_nothing_can_be_had(tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    subscriber = Subscriber(store)
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        manifests = _publish(publisher, range(2))
        subscriber.fetch(manifests[0])
        folder.lose = {"files"}
        with pytest.raises(WeightUpdateError):
            subscriber.fetch(manifests[1])
        assert_is(0, subscriber.fetch(manifests[0]))


@pytest.mark.parametrize("wrong", ["digest", "entries", "url"])
def test_a_manifest_that_lies_is_refused(wrong: str, tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        manifest, other = _publish(publisher, range(2))
        lie = {
            "digest": replace(manifest, version=other.version, tensors=other.tensors),
            "entries": replace(manifest, tensors=other.tensors),
            "url": replace(manifest, url="memory:weights/run/0"),
        }[wrong]
        with pytest.raises(WeightUpdateError):
            subscriber.fetch(lie)


def test_a_failed_upload_is_told_once_and_the_chain_goes_on_from_what_was_committed(tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path)
    subscriber = Subscriber(WeightStore.open(str(tmp_path)), wait_s=0.1)
    publisher = StoreWeights(store, FAST)
    subscriber.fetch(_publish(publisher, range(1))[0])
    folder.refuse_writes = {"delta"}
    lost = publisher.publish(version_at(1), tensors_at(1))
    with pytest.raises(WeightUpdateError, match="did not appear"):
        subscriber.fetch(lost)
    with pytest.raises(StoreError):
        publisher.publish(version_at(2), tensors_at(2))
    folder.refuse_writes = set()
    manifest = publisher.publish(version_at(2), tensors_at(2))
    publisher.close()
    assert manifest.base is not None and manifest.base.step == 0
    assert_is(2, subscriber.fetch(manifest))
    assert subscriber.counters.fallbacks == 0


def test_equal_weights_under_another_step_are_a_version_too(tmp_path: Path) -> None:
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        manifests = [publisher.publish(version_at(step), tensors_at(0)) for step in range(3)]
        publisher.flush()
        assert_is(0, Subscriber(WeightStore.open(str(tmp_path))).fetch(manifests[2]))


def test_a_run_that_begins_again_goes_on_in_the_same_store(tmp_path: Path) -> None:
    subscriber = Subscriber(WeightStore.open(str(tmp_path)))
    for first in (0, 2):
        with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
            for manifest in _publish(publisher, range(first, first + 3)):
                assert_is(manifest.version.step, subscriber.fetch(manifest))


def test_tensors_may_be_on_their_way_through_autograd(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST) as publisher:
        manifest = publisher.publish(version_at(0), {"p": parameter})
        assert not publisher.fetch(manifest)["p"].requires_grad


def test_weights_may_be_rounded_on_their_way(tmp_path: Path) -> None:
    tensors = {"f": torch.full((3,), 1 + 2**-20), "i": torch.arange(3)}
    with StoreWeights(WeightStore.open(str(tmp_path)), FAST, torch.bfloat16) as publisher:
        manifest = publisher.publish(version_at(0), tensors)
        found = Subscriber(WeightStore.open(str(tmp_path))).fetch(manifest)
    assert manifest.version.format == "bfloat16"
    assert torch.equal(found["f"], torch.ones(3).bfloat16())
    assert torch.equal(found["i"], tensors["i"])


def test_a_relay_fetches_each_byte_once_for_many_replicas(tmp_path: Path) -> None:
    _, folder = failing_store(tmp_path / "store")
    relay = Relay(folder, tmp_path / "cache")
    subscribers = [Subscriber(WeightStore(FailingFolder(_as_folder(relay)))) for _ in range(4)]
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        for step in range(3):
            (manifest,) = _publish(publisher, range(step, step + 1))
            threads = [threading.Thread(target=each.fetch, args=(manifest,)) for each in subscribers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for each in subscribers:
                assert_is(step, each.fetch(manifest))
    names = [name for name in folder.reads if name.startswith("files")]
    assert len(names) == len(set(names))
    assert relay.counters.served_bytes > 3 * relay.counters.fetched_bytes > 0


def test_a_relay_heals_damage_and_starts_again_from_its_cache(tmp_path: Path) -> None:
    _, folder = failing_store(tmp_path / "store")
    folder.flip, folder.once = {"files"}, True
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        (manifest,) = _publish(publisher, range(1))
    relay = Relay(folder, tmp_path / "cache")
    assert_is(0, Subscriber(WeightStore(_as_folder(relay))).fetch(manifest))
    assert relay.counters.damaged > 0
    again = Relay(folder, tmp_path / "cache")
    assert_is(0, Subscriber(WeightStore(_as_folder(again))).fetch(manifest))
    assert again.counters.fetched_bytes == 0


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_relay_whose_cache_is_damaged_fetches_again(damage: str, tmp_path: Path) -> None:
    _, folder = failing_store(tmp_path / "store")
    relay = Relay(folder, tmp_path / "cache")
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        (manifest,) = _publish(publisher, range(1))
    Subscriber(WeightStore(_as_folder(relay))).fetch(manifest)
    for path in (tmp_path / "cache").rglob("*.etude"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.unlink() if damage == "remove" else path.write_bytes(data)
    assert_is(0, Subscriber(WeightStore(_as_folder(relay))).fetch(manifest))


def test_a_relay_keeps_no_more_than_it_may(tmp_path: Path) -> None:
    _, folder = failing_store(tmp_path / "store")
    relay = Relay(folder, tmp_path / "cache", max_bytes=9000)
    subscriber = Subscriber(WeightStore(_as_folder(relay)))
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        for step in range(6):
            (manifest,) = _publish(publisher, range(step, step + 1))
            assert_is(step, subscriber.fetch(manifest))
    assert sum(path.stat().st_size for path in (tmp_path / "cache" / "files").rglob("*.etude")) <= 9000


@pytest.mark.slow
def test_a_relay_whose_disk_is_full_serves_on_and_keeps_what_is_new(small_disk: Path, tmp_path: Path) -> None:
    store, folder = failing_store(tmp_path / "store")
    relay = Relay(folder, small_disk / "cache")
    subscriber = Subscriber(WeightStore(_as_folder(relay)))

    def bring(step: int) -> None:
        tensors = {name: torch.randn(5_000) for name in "abcd"}
        found = subscriber.fetch(publisher.publish(version_at(step), tensors))
        assert all(torch.equal(tensor, found[name]) for name, tensor in tensors.items())

    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        for step in range(20):
            bring(step)
        publisher.flush()
        fetched = relay.counters.fetched_bytes
        for file in store.commits()[20].delta:
            relay.read(file.name)
        assert relay.counters.fetched_bytes == fetched, "the newest are at hand"
        for path in (small_disk / "cache" / "files").rglob("*.etude"):
            path.unlink()
        filled(small_disk, 0)
        bring(20)


def test_a_relay_forgets_versions_that_the_store_has_collected(tmp_path: Path) -> None:
    _, folder = failing_store(tmp_path / "store")
    relay = Relay(folder, tmp_path / "cache")
    subscriber = Subscriber(WeightStore(_as_folder(relay)), pin_s=0)
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        for step in range(30):
            (manifest,) = _publish(publisher, range(step, step + 1))
            subscriber.fetch(manifest)
    there = WeightStore(folder).commits()
    assert relay._commits.keys() == {commit_name(sequence) for sequence in there}
    assert relay._expected.keys() <= {file.name for commit in there.values() for file in commit.files}


class _RelayAsFolder:
    """A relay in this process."""

    def __init__(self, relay: Relay) -> None:
        self.url = "relay"
        self.list, self.read, self.write = relay.list, relay.read, relay.write

    def create(self, name: str, data: bytes) -> None:
        raise AssertionError(name)

    def delete(self, name: str) -> None:
        raise AssertionError(name)

    def sweep(self, prefix: str) -> None:
        raise AssertionError(prefix)


def _as_folder(relay: Relay) -> _RelayAsFolder:
    return _RelayAsFolder(relay)


def test_of_an_adapter_only_factors_travel_from_version_to_version(tmp_path: Path) -> None:
    """A base of 400 KB in bfloat16 and factors of 10 KB: an update takes about what the factors do."""
    store = WeightStore.open(str(tmp_path))
    base = {"w": torch.randn(200, 1000)}
    factors = {
        f"{ADAPTER_PREFIX}w.left": torch.randn(200, 2),
        f"{ADAPTER_PREFIX}w.right": torch.randn(2, 1000),
    }
    subscriber, sizes = Subscriber(store, wait_s=5.0), [0]
    with StoreWeights(store, FAST, torch.bfloat16) as weights:
        for step in range(3):
            factors = {name: factor + 1e-3 for name, factor in factors.items()}
            manifest = weights.publish(PolicyVersion("run", step, adapter="run"), base | factors)
            found = weights.fetch(manifest)
            assert found["w"].dtype == torch.bfloat16
            for name, factor in factors.items():
                assert torch.equal(found[name], factor), "factors are not rounded"
            fetched = subscriber.fetch(manifest)
            assert all(torch.equal(fetched[name], found[name]) for name in found)
            sizes.append(subscriber.counters.fetched_bytes - sum(sizes))
    assert subscriber.counters.deltas == 2
    assert max(sizes[2:]) < sum(factor.nbytes for factor in factors.values()) + 1000 < sizes[1] / 20
