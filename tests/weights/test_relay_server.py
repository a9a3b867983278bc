"""Authorisation of a relay's readers, and refused requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from etude.config import WeightsConfig
from etude.errors import ConfigError, StoreError
from etude.weights import StoreWeights, Subscriber, WeightStore, make_subscriber
from etude.weights.client import RelayFolder
from etude.weights.folders import DirectoryFolder, open_folder
from etude.weights.opening import check_reading
from etude.weights.relay import Relay
from etude.weights.server import RelayServer
from tests.weights.stores import FAST, assert_is, tensors_at, version_at

TOKEN = "a-token"


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[RelayServer]:
    """Before the store in `store`, with a token."""
    made = Relay(DirectoryFolder(tmp_path / "store"), tmp_path / "cache")
    with RelayServer(made, token=TOKEN) as server:
        yield server


def token_file(path: Path, token: str = TOKEN) -> str:
    path.write_text(token)
    path.chmod(0o600)
    return f"file:{path}"


@pytest.mark.parametrize("token", [None, "another"])
def test_readers_without_the_token_are_told_and_get_nothing(relay: RelayServer, token: str | None) -> None:
    folder = RelayFolder(relay.url, token=token)
    for ask in (lambda: folder.list("commits"), lambda: folder.read("commits/1.json")):
        with pytest.raises(StoreError, match="token") as caught:
            ask()
        assert caught.value.field == "weights.token"
    with pytest.raises(StoreError):
        folder.write("pins/x.json", b"{}")
    assert httpx.get(f"{relay.url}/metrics", timeout=60).status_code == 401
    assert httpx.get(f"{relay.url}/health", timeout=60).json() == {"status": "healthy"}


def test_it_can_be_seen_beforehand_whether_a_relay_lets_one_read(relay: RelayServer, tmp_path: Path) -> None:
    named = {"read_url": relay.url, "token": token_file(tmp_path / "token")}
    check_reading(WeightsConfig.model_validate(named))
    with pytest.raises(StoreError, match=r"weights\.token"):
        check_reading(WeightsConfig.model_validate(named | {"token": token_file(tmp_path / "b", "another")}))


def test_an_engine_reads_through_a_relay_with_the_token_that_its_configuration_names(
    relay: RelayServer, tmp_path: Path
) -> None:
    config = WeightsConfig(read_url=relay.url, token=token_file(tmp_path / "token"), patience_s=0.0)
    with StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher:
        manifest = publisher.publish(version_at(0), tensors_at(0))
        assert_is(0, make_subscriber(config).fetch(manifest))
    with pytest.raises(ConfigError, match=r"weights\.token"):
        make_subscriber(WeightsConfig(read_url=relay.url, token="env:ETUDE_NO_SUCH_VARIABLE"))


def test_a_relay_before_another_fetches_each_byte_once(relay: RelayServer, tmp_path: Path) -> None:
    near = Relay(open_folder(relay.url, TOKEN), tmp_path / "near")
    with (
        RelayServer(near) as server,
        StoreWeights(WeightStore.open(str(tmp_path / "store")), FAST) as publisher,
    ):
        manifest = publisher.publish(version_at(0), tensors_at(0))
        publisher.flush()
        for _ in range(3):
            assert_is(0, Subscriber(WeightStore.open(server.url)).fetch(manifest))
    files = sum(path.stat().st_size for path in (tmp_path / "store" / "files").rglob("*") if path.is_file())
    assert near.counters.fetched_bytes == files
    assert near.counters.served_bytes >= 3 * files


def test_notes_that_are_none_are_refused(relay: RelayServer) -> None:
    folder = RelayFolder(relay.url, token=TOKEN)
    with pytest.raises(StoreError, match="too large"):
        folder.write("pins/x.json", b"x" * (1 << 17))
    headers = {"authorization": f"Bearer {TOKEN}"}
    for name in ("commits/%2e%2e/%2e%2e/secret", "commits//x"):
        answer = httpx.get(f"{relay.url}/files/{name}", headers=headers, timeout=60)
        assert answer.status_code in (400, 404)


def test_a_relay_without_a_token_answers_to_loopback_names_alone(tmp_path: Path) -> None:
    relay = Relay(DirectoryFolder(tmp_path / "store"), tmp_path / "cache")
    with RelayServer(relay) as server:
        assert httpx.get(f"{server.url}/list/commits", timeout=60).json() == []
        assert (
            httpx.get(f"{server.url}/list/commits", headers={"host": "evil.example"}, timeout=60).status_code
            == 401
        )
