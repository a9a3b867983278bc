"""Stores over the network: an S3-speaking server, and a relay over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Response
from moto.server import ThreadedMotoServer

from etude.errors import StoreError, WeightUpdateError
from etude.serving.process import ServerThread
from etude.weights import StoreWeights, Subscriber, WeightStore
from etude.weights.client import RelayFolder
from etude.weights.folders import (
    DirectoryFolder,
    ExistsError,
    MissingError,
    UnavailableError,
    open_folder,
)
from etude.weights.relay import Relay
from etude.weights.server import RelayServer
from etude.weights.writer import StoreWriter
from tests.weights.stores import FAST, assert_is, failing_store, tensors_at, version_at


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, object]]:
    """Options for fsspec that lead to a server of this process, with a bucket `weights`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    options: dict[str, object] = {
        "key": "test",
        "secret": "test",
        "endpoint_url": f"http://127.0.0.1:{port}",
    }
    import s3fs

    s3fs.S3FileSystem(**options).mkdir("weights")
    yield options
    server.stop()


@pytest.mark.slow
@pytest.mark.foreign
def test_s3_creates_a_name_once(s3: dict[str, object]) -> None:
    folder = open_folder("s3://weights/folder", **s3)
    folder.create("a/b", b"1")
    with pytest.raises(ExistsError):
        folder.create("a/b", b"2")
    folder.write("a/c", b"3")
    assert folder.list("a") == ["a/b", "a/c"]
    assert folder.read("a/b") == b"1"
    folder.delete("a/b")
    folder.delete("a/b")
    with pytest.raises(MissingError):
        folder.read("a/b")


@pytest.mark.slow
@pytest.mark.foreign
def test_versions_travel_through_s3(s3: dict[str, object]) -> None:
    subscriber = Subscriber(WeightStore.open("s3://weights/run", **s3))
    with StoreWeights(WeightStore.open("s3://weights/run", **s3), replace(FAST, lease_s=15)) as publisher:
        for step in range(3):
            manifest = publisher.publish(version_at(step), tensors_at(step))
            assert_is(step, subscriber.fetch(manifest))
        with pytest.raises(StoreError, match="another writer"):
            StoreWriter(WeightStore.open("s3://weights/run", **s3), replace(FAST, lease_s=15))
    assert subscriber.counters.deltas == 2


@pytest.mark.slow
@pytest.mark.foreign
def test_a_bucket_that_is_not_there_is_said_before_anything_is_published(s3: dict[str, object]) -> None:
    with pytest.raises(StoreError) as caught:
        StoreWriter(WeightStore.open("s3://nowhere/run", **s3), FAST)
    assert caught.value.field == "weights.url"


def test_what_a_store_s_own_client_raises_is_told_in_our_words() -> None:
    nobody = {"key": "test", "secret": "test", "endpoint_url": "http://127.0.0.1:9"}
    quick = {"config_kwargs": {"retries": {"max_attempts": 1}}}
    with pytest.raises(UnavailableError, match=r"weights\.url: .*EndpointConnectionError"):
        open_folder("s3://weights/run", **nobody, **quick).list("commits")


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[tuple[Relay, str]]:
    """Before the store in `store`."""
    made = Relay(DirectoryFolder(tmp_path / "store"), tmp_path / "cache")
    with RelayServer(made) as server:
        yield made, server.url


def test_replicas_read_through_a_relay(relay: tuple[Relay, str], tmp_path: Path) -> None:
    made, url = relay
    subscribers = [Subscriber(WeightStore.open(url)) for _ in range(3)]
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        for step in range(2):
            manifest = publisher.publish(version_at(step), tensors_at(step))
            threads = [threading.Thread(target=each.fetch, args=(manifest,)) for each in subscribers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for each in subscribers:
                assert_is(step, each.fetch(manifest))
        store = WeightStore.open(str(tmp_path / "store"))
        assert len(store.folder.list("pins")) == 3
    stored = sum(file.size_bytes for commit in store.commits().values() for file in commit.files)
    assert made.counters.fetched_bytes <= stored
    assert "etude_weight_relay_fetched_bytes_total" in httpx.get(f"{url}/metrics", timeout=60).text


def test_a_relay_takes_no_versions_and_leaves_its_folder_to_nobody(relay: tuple[Relay, str]) -> None:
    folder = RelayFolder(relay[1])
    for write in (folder.create, folder.write):
        with pytest.raises(StoreError):
            write("commits/000000000001.json", b"x")
    with pytest.raises(MissingError):
        folder.read("commits/000000000001.json")
    for name in ("commits/../../secret", "commits//x"):
        with pytest.raises(StoreError):
            folder.read(name)


def test_a_relay_that_is_gone_is_named_and_one_that_comes_back_serves(tmp_path: Path) -> None:
    subscriber: Subscriber | None = None
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        for step in range(2):
            manifest = publisher.publish(version_at(step), tensors_at(step))
            publisher.flush()
            relay = Relay(DirectoryFolder(tmp_path / "store"), tmp_path / "cache")
            with RelayServer(relay) as server:
                subscriber = Subscriber(WeightStore.open(server.url))
                assert_is(step, subscriber.fetch(manifest))
        later = publisher.publish(version_at(2), tensors_at(2))
        publisher.flush()
    assert subscriber is not None
    with pytest.raises((StoreError, WeightUpdateError), match="does not answer"):
        subscriber.fetch(later)
    assert_is(1, subscriber._current.whole)


@pytest.mark.parametrize("page", ["<html>welcome</html>", '{"detail": "welcome"}'])
def test_a_server_that_is_no_relay_is_told(page: str) -> None:
    app = FastAPI()
    app.add_api_route("/{path:path}", lambda: Response(page), methods=["GET"])
    with ServerThread(app) as server, pytest.raises(StoreError, match="not the answer of a relay"):
        RelayFolder(server.url).list("commits")


def test_a_store_that_fails_behind_a_relay_is_told(tmp_path: Path) -> None:
    _, folder = failing_store(tmp_path / "store")
    folder.lose = {"commits"}
    relay = Relay(folder, tmp_path / "cache")
    with RelayServer(relay) as server, pytest.raises(StoreError, match="link is down"):
        RelayFolder(server.url).read("commits/000000000001.json")
