"""How long new weights take from the trainer into service."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import RunConfig
from etude.controller.compute import Place
from etude.controller.planning.machine import Rates
from etude.controller.planning.parts import published_bytes, publishes_in_parts
from etude.controller.planning.processes import Processes
from etude.controller.planning.sizes import ModelSizes

_COPY = 2.0
"""Bytes that a copy moves, over those copied."""
_ROUNDED_RATIO, _EXACT_RATIO = 20.0, 1.5
"""Times that an update is smaller than the weights: of bfloat16 numbers at usual rates, of float32."""


@dataclass(frozen=True, slots=True)
class PublicationTimes:
    """One version on its way."""

    held_s: float
    """For which the trainer is held: it gathers, copies and hashes."""
    travel_s: float
    """From then on until the engines serve it."""
    update_bytes: float
    """What crosses each link."""

    @property
    def total_s(self) -> float:
        """From the trainer into service."""
        return self.held_s + self.travel_s


def plan_publication(
    config: RunConfig, sizes: ModelSizes, place: Place, rates: Rates, processes: Processes
) -> PublicationTimes:
    """Within a process weights are copied; over Ray they pass through a directory; with a store as deltas,
    which every rank encodes of what it has."""
    weights = float(sizes.parameters * place.element_bytes)
    copy_s = _COPY * weights / rates.bytes_per_s
    network = rates.bytes_per_s if processes.on_one_machine else config.plan.network_gb_per_s * 1e9
    cut = config.parallel.fsdp * config.parallel.expert * config.parallel.tensor
    gathered_s = 0.0 if publishes_in_parts(config) else weights * (1 - 1 / cut) / network
    if config.weights.url:
        writers = config.parallel.ranks if publishes_in_parts(config) else 1
        travel_s, update = _through_store(config, sizes, place, network, writers, processes)
        return PublicationTimes(gathered_s + copy_s / writers, travel_s + copy_s, update)
    if processes.apart:  # written, and read again
        return PublicationTimes(gathered_s + weights / network, weights / network + copy_s, weights)
    return PublicationTimes(gathered_s + copy_s, copy_s, weights)


def _through_store(
    config: RunConfig,
    sizes: ModelSizes,
    place: Place,
    network: float,
    writers: int,
    processes: Processes,
) -> tuple[float, float]:
    """(seconds until an engine has decoded it, bytes of the delta)."""
    plan, store = config.plan, config.weights
    published = float(sizes.parameters * published_bytes(config, place))
    usual = _ROUNDED_RATIO if store.dtype == "bfloat16" else _EXACT_RATIO
    delta = published / (plan.update_ratio or usual)
    # A full snapshot goes along with every so many versions; who is up to date does not read it.
    written = delta + published / store.snapshot_every
    codec = plan.codec_gb_per_s * 1e9 * store.workers
    seconds = published / writers / codec + written / writers / network + delta / network + published / codec
    if processes.elsewhere:
        seconds += delta / (plan.link_gb_per_s * 1e9)
    return seconds, delta
