"""A store that is unavailable for a while costs time, and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from etude.config import WeightsConfig
from etude.errors import StoreError
from etude.weights import StoreWeights, Subscriber, WeightStore, check_store
from etude.weights.client import RelayFolder
from etude.weights.folders import DirectoryFolder, ExistsError, Folder, MissingError, UnavailableError
from etude.weights.patience import PatientFolder
from etude.weights.relay import Relay
from etude.weights.server import RelayServer
from tests.sandbox.test_lifecycle import eventually
from tests.weights.stores import FAST, assert_is, tensors_at, version_at


class AwayFolder:
    """A folder that does not answer so many calls, or does what it is asked and does not answer."""

    def __init__(self, inner: Folder) -> None:
        self.inner = inner
        self.url = inner.url
        self.away = 0
        """Calls that come to nothing, from now on."""
        self.loses_answers = 0
        """Calls that are done and not answered."""
        self._lock = threading.Lock()

    def list(self, prefix: str) -> list[str]:
        self._arrive()
        return self.inner.list(prefix)

    def read(self, name: str) -> bytes:
        self._arrive()
        return self.inner.read(name)

    def write(self, name: str, data: bytes) -> None:
        self._arrive()
        self.inner.write(name, data)
        self._answer()

    def create(self, name: str, data: bytes) -> None:
        self._arrive()
        self.inner.create(name, data)
        self._answer()

    def delete(self, name: str) -> None:
        self._arrive()
        self.inner.delete(name)
        self._answer()

    def sweep(self, prefix: str) -> None:
        self._arrive()
        self.inner.sweep(prefix)

    def _arrive(self) -> None:
        with self._lock:
            is_away, self.away = self.away > 0, max(0, self.away - 1)
        if is_away:
            raise UnavailableError("does not answer", received=self.url)

    def _answer(self) -> None:
        with self._lock:
            is_lost, self.loses_answers = self.loses_answers > 0, max(0, self.loses_answers - 1)
        if is_lost:
            raise UnavailableError("answers too late", received=self.url)


@pytest.fixture
def away(tmp_path: Path) -> AwayFolder:
    return AwayFolder(DirectoryFolder(tmp_path / "store"))


def test_what_is_asked_is_asked_again_until_the_store_answers(away: AwayFolder) -> None:
    waits: list[tuple[float, str]] = []
    folder = PatientFolder(away, 60.0, lambda *wait: waits.append(wait))
    for count, call in enumerate(
        (
            lambda: folder.write("a", b"1"),
            lambda: folder.create("b", b"2"),
            lambda: folder.read("a"),
            lambda: folder.delete("a"),
        ),
        1,
    ):
        away.away = 1
        call()
        assert len(waits) == count
    away.away = 2
    assert folder.list("") == ["b"]
    waited_s, cause = waits[-1]
    assert waited_s >= 0.3, "two pauses"
    assert "does not answer" in cause


def test_a_store_that_stays_away_is_told_once_patience_ends(away: AwayFolder) -> None:
    away.away = 1000
    waits: list[tuple[float, str]] = []
    folder = PatientFolder(away, 0.25, lambda *wait: waits.append(wait))
    with pytest.raises(UnavailableError, match="does not answer"):
        folder.read("a")
    ((waited_s, _),) = waits
    assert waited_s >= 0.25


def test_what_is_not_there_or_taken_is_told_at_once(away: AwayFolder) -> None:
    waits: list[float] = []
    folder = PatientFolder(away, 60.0, lambda waited_s, _: waits.append(waited_s))
    with pytest.raises(MissingError):
        folder.read("a")
    folder.create("a", b"theirs")
    with pytest.raises(ExistsError):
        folder.create("a", b"ours")
    assert waits == []


def test_a_creation_whose_answer_was_lost_is_our_own(away: AwayFolder) -> None:
    folder = PatientFolder(away, 60.0)
    away.loses_answers = 1
    folder.create("a", b"ours")
    assert away.inner.read("a") == b"ours"


def test_versions_are_published_and_read_over_outages_on_the_way(away: AwayFolder) -> None:
    subscriber = Subscriber(WeightStore(PatientFolder(away, 60.0)))
    with StoreWeights(WeightStore(PatientFolder(away, 60.0)), FAST) as publisher:
        for step in range(6):
            away.away, away.loses_answers = step % 4, step % 2
            manifest = publisher.publish(version_at(step), tensors_at(step))
            assert_is(step, subscriber.fetch(manifest))
    assert subscriber.counters.fallbacks == 0
    assert len(WeightStore(away.inner).commits()) == 6


def test_a_store_away_behind_a_relay_is_asked_again_and_one_that_refuses_is_not(
    away: AwayFolder, tmp_path: Path
) -> None:
    with RelayServer(Relay(away, tmp_path / "cache")) as server:
        waits: list[float] = []
        folder = PatientFolder(RelayFolder(server.url), 60.0, lambda waited_s, _: waits.append(waited_s))
        away.inner.write("commits/000000000001.json", b"x")
        away.away = 2
        assert folder.list("commits") == ["commits/000000000001.json"]
        assert len(waits) == 1
        with pytest.raises(StoreError, match="a relay is read-only"):
            folder.write("commits/000000000002.json", b"x")
        assert len(waits) == 1


def test_a_store_that_cannot_be_used_is_told_without_patience(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match=r"weights\.url: is a file, not a directory"):
        check_store(WeightsConfig(url=str(tmp_path / "file")))
    with pytest.raises(UnavailableError, match="the relay does not answer"):
        check_store(WeightsConfig(url=str(tmp_path / "store"), read_url="http://127.0.0.1:9"))
    check_store(WeightsConfig(url=str(tmp_path / "store")))
    check_store(WeightsConfig())


def test_who_waits_says_why_and_can_be_told_to_wait_no_longer(tmp_path: Path) -> None:
    away = AwayFolder(DirectoryFolder(tmp_path))
    away.away = 1_000_000
    folder = PatientFolder(away, 600.0)
    assert folder.trouble == ""
    raised: list[StoreError] = []

    def read() -> None:
        try:
            folder.read("a")
        except StoreError as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert eventually(lambda: "does not answer" in folder.trouble)
    folder.close()
    reader.join(60)
    assert not reader.is_alive()
    assert isinstance(raised[0], UnavailableError)
    assert folder.trouble == ""
