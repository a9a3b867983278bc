"""Opens the publisher and the subscriber that a run's configuration describes."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from etude.config import WeightsConfig
from etude.kit.secrets import read_secret
from etude.records import WeightManifest
from etude.weights.commits import COMMITS
from etude.weights.folders import Folder, open_folder
from etude.weights.memory import MemoryWeights
from etude.weights.patience import OnWait, PatientFolder
from etude.weights.publisher import Peers, StoreWeights, WeightPublisher
from etude.weights.store import WeightStore
from etude.weights.subscriber import Subscriber
from etude.weights.writer import WriterOptions

_TRIALS = "trials"
"""Directory of test files by which write access is checked."""
WeightFetcher = Callable[[WeightManifest], Mapping[str, Tensor]]


@contextlib.contextmanager
def open_weights(
    config: WeightsConfig, *, in_parts: bool = False
) -> Generator[tuple[WeightPublisher, WeightFetcher]]:
    """Publisher and fetcher for a trainer and engines in one process. `in_parts`: other processes publish
    parts to the store too, so that engines must read it.

    Raises StoreError if the store cannot be written or another run publishes to it; and on exit, if the last
    version could not be uploaded.
    """
    if not config.url:
        memory = MemoryWeights()
        yield memory, memory.fetch
        return
    with open_publisher(config) as publisher:
        from_store = in_parts or bool(config.read_url)
        yield publisher, make_subscriber(config).fetch if from_store else publisher.fetch


def open_publisher(
    config: WeightsConfig, peers: Peers | None = None, on_wait: OnWait | None = None
) -> StoreWeights:
    """The publisher of a trainer whose engines run in other processes; must be closed. `peers`: processes
    that publish with it; `on_wait`: called after outages of the store.

    Raises StoreError: see `open_weights`.
    """
    options = WriterOptions(
        snapshot_every=config.snapshot_every,
        keep_snapshots=config.keep_snapshots,
        overwrite=config.overwrite,
        workers=config.workers,
        lease_s=config.lease_s,
    )
    dtype = None if config.dtype == "trained" else torch.bfloat16
    folder = PatientFolder(open_folder(config.url), config.patience_s, on_wait)
    scratch = Path(config.scratch) if config.scratch else None
    return StoreWeights(WeightStore(folder), options, dtype, peers, scratch)


def make_subscriber(config: WeightsConfig) -> Subscriber:
    """The subscriber of an engine outside the trainer's process. Raises StoreError for an unusable URL."""
    folder = PatientFolder(open_reading(config), config.patience_s)
    return Subscriber(WeightStore(folder), wait_s=config.wait_s, workers=config.workers, link=folder)


def open_reading(config: WeightsConfig) -> Folder:
    """The folder that engines read, without retries. Raises ConfigError for a token that cannot be read."""
    return open_folder(config.read_url or config.url, read_secret(config.token, "weights.token"))


def check_store(config: WeightsConfig) -> None:
    """Checks once, without retries, that the store can be written, and read where engines read it.

    Raises StoreError without access rights, or if it does not answer.
    """
    if config.url:
        folder, name = open_folder(config.url), f"{_TRIALS}/{uuid.uuid4().hex}"
        folder.write(name, b"")
        folder.delete(name)
    if config.read_url:
        check_reading(config)


def check_reading(config: WeightsConfig) -> None:
    """Checks once, without retries, that engines can read the store.

    Raises StoreError without access rights; UnavailableError, a StoreError, if it does not answer.
    """
    open_reading(config).list(COMMITS)
