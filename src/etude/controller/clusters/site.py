"""What a sampling cluster plays with, on which terms, and what it has done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from etude.controller.clusters.supply import WeightLink
from etude.controller.clusters.wire import Makings
from etude.protocols import EpisodeRunner, KvPolicy, Sampler, WeightSink
from etude.store.blobs import MemoryBlobs
from etude.weights.folders import Folder


@dataclass(frozen=True, slots=True)
class Site:
    """What a cluster plays sessions with."""

    runner: EpisodeRunner
    sampler: Sampler
    sink: WeightSink
    blobs: MemoryBlobs
    """Where `runner` keeps expert routes."""
    makings: Makings
    max_sessions: int
    kv: KvPolicy
    check: Callable[[], None]
    """Raises SamplerError where nothing will be sampled any more."""
    link: WeightLink
    """What `sink` fetches weights through."""
    source: str
    """Where they come from: a relay, or the store itself."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the run asks of its clusters."""

    lease_s: float
    poll_s: float
    max_bytes: int
    store: Folder | None
    """Where finished sessions go; None: to the run itself."""


@dataclass(slots=True)
class SamplingCounts:
    """What this process has done."""

    played: int = 0
    kept: int = 0
    unwanted: int = 0
    """Sessions that the run had from somebody else, or no longer wanted, when they were done or before."""
    failed: int = 0
    sent_bytes: int = 0
    versions: int = 0
    """Of weights that were in service here."""
    unanswered: int = 0
    """Requests that the run did not answer; each was made again."""
