"""The two ends that a run's configuration asks for."""

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
"""Where it is tried out whether a store can be written."""
WeightFetcher = Callable[[WeightManifest], Mapping[str, Tensor]]


@contextlib.contextmanager
def open_weights(
    config: WeightsConfig, *, in_parts: bool = False
) -> Generator[tuple[WeightPublisher, WeightFetcher]]:
    """Publisher and fetcher for a trainer and engines in one process. `in_parts`: other processes publish to
    the store too, so that engines have to read it.

    Raises StoreError where the store cannot be written, or another run publishes to it; and, on the way out,
    if the last version could not be uploaded.
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
    """For a trainer whose engines are elsewhere; `peers`: those that publish with it; `on_wait`: gets the
    store's outages. Close it.

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
    """For an engine that is not where the trainer is. Raises StoreError for a URL that cannot be opened."""
    folder = PatientFolder(open_reading(config), config.patience_s)
    return Subscriber(WeightStore(folder), wait_s=config.wait_s, workers=config.workers, link=folder)


def open_reading(config: WeightsConfig) -> Folder:
    """Where engines read the store, without patience. Raises ConfigError for a token that cannot be read."""
    return open_folder(config.read_url or config.url, read_secret(config.token, "weights.token"))


def check_store(config: WeightsConfig) -> None:
    """Writes to the store and looks at where engines read it, once and without patience.

    Raises StoreError where there is no right to, or nobody answers.
    """
    if config.url:
        folder, name = open_folder(config.url), f"{_TRIALS}/{uuid.uuid4().hex}"
        folder.write(name, b"")
        folder.delete(name)
    if config.read_url:
        check_reading(config)


def check_reading(config: WeightsConfig) -> None:
    """Looks at where engines read the store, once and without patience.

    Raises StoreError where there is no right to; UnavailableError, which is one, where nobody answers.
    """
    open_reading(config).list(COMMITS)
