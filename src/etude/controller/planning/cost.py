"""Estimates time and cost of one RL step, from the machine's rates and assumptions about its sessions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etude.config import RunConfig
from etude.controller.compute import Place
from etude.controller.planning.machine import Rates
from etude.controller.planning.parts import published_bytes, publishes_in_parts
from etude.controller.planning.processes import Processes
from etude.controller.planning.sampling import SamplingTimes, plan_sampling
from etude.controller.planning.sizes import ModelSizes
from etude.controller.reinforcement import overlaps_publication

_COPY = 2.0
"""Bytes that a copy moves per byte copied."""
_ROUNDED_RATIO, _EXACT_RATIO = 20.0, 1.5
"""Size of the weights over that of an update: for bfloat16 at usual learning rates, and for float32."""


@dataclass(frozen=True, slots=True)
class PublicationTimes:
    """Times of the publication of one version."""

    held_s: float
    """Time for which the trainer is blocked: it gathers, copies and hashes."""
    travel_s: float
    """Time from then on until the engines serve the version."""
    update_bytes: float
    """Bytes sent over each link."""

    @property
    def total_s(self) -> float:
        """Time from the trainer into service."""
        return self.held_s + self.travel_s


def plan_publication(
    config: RunConfig, sizes: ModelSizes, place: Place, rates: Rates, processes: Processes
) -> PublicationTimes:
    """Estimates a publication: within a process weights are copied; over Ray they pass through a directory;
    with a store they are sent as deltas, and every rank encodes its shards."""
    weights = float(sizes.parameters * place.element_bytes)
    copy_s = _COPY * weights / rates.bytes_per_s
    network = rates.bytes_per_s if processes.on_one_machine else config.plan.network_gb_per_s * 1e9
    cut = config.parallel.fsdp * config.parallel.expert * config.parallel.tensor
    gathered_s = 0.0 if publishes_in_parts(config) else weights * (1 - 1 / cut) / network
    if not config.weights.url:
        if processes.apart:  # written, and read again
            return PublicationTimes(gathered_s + weights / network, weights / network + copy_s, weights)
        return PublicationTimes(gathered_s + copy_s, copy_s, weights)
    plan, store = config.plan, config.weights
    writers = config.parallel.ranks if publishes_in_parts(config) else 1
    published = float(sizes.parameters * published_bytes(config, place))
    usual = _ROUNDED_RATIO if store.dtype == "bfloat16" else _EXACT_RATIO
    delta = published / (plan.update_ratio or usual)
    # A full snapshot is written with every so many versions; engines that are up to date do not read it.
    written = delta + published / store.snapshot_every
    codec = plan.codec_gb_per_s * 1e9 * store.workers
    travel_s = published / writers / codec + written / writers / network + delta / network + published / codec
    if processes.elsewhere:
        travel_s += delta / (plan.link_gb_per_s * 1e9)
    return PublicationTimes(gathered_s + copy_s / writers, travel_s + copy_s, delta)


_BACKWARD = 2.0
"""Products of the backward pass over those of the forward pass."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one RL step, in seconds, and its sizes."""

    sampled: SamplingTimes
    """The sessions of the step, including those that are not trained on."""
    trained_tokens: float
    train_s: float
    publication: PublicationTimes
    validation_s: float
    """The step's share of validation, during which sampling and training wait."""
    evaluation_s: float
    """One evaluation during training, in its own process; 0 without."""
    evaluations: float
    """Number of such evaluations per step."""
    is_beside: bool
    """Whether sampling continues while the trainer steps."""
    overlapped: bool
    """Whether new weights are transferred while the next step is taken."""
    shares_cores: bool
    """Whether the run's processes share cores, and so compute in turn."""

    @property
    def left_out(self) -> bool:
        """Whether evaluations take longer than the steps between them, so that some are skipped."""
        return self.evaluations * self.evaluation_s > self.step_s

    @property
    def training_side_s(self) -> float:
        """Time for which the trainer is busy or blocked."""
        if not self.overlapped:
            return self.train_s + self.publication.total_s
        return max(self.train_s + self.publication.held_s, self.publication.total_s)

    @property
    def step_s(self) -> float:
        """Wall time: the sum where sampling and training take turns, else the slower one; with shared cores
        the sum of all computation, unless sessions wait longer for their tools."""
        judged_s = self.evaluations * self.evaluation_s if self.shares_cores else 0.0
        in_turns = self.train_s + self.publication.total_s + self.validation_s + judged_s
        if not self.is_beside:
            return self.sampled.wall_s + in_turns
        if self.shares_cores:
            return max(self.sampled.wall_s, self.sampled.busy_s + in_turns)
        return max(self.sampled.wall_s, self.training_side_s)


def plan_step(config: RunConfig, sizes: ModelSizes, place: Place, rates: Rates) -> StepTimes:
    """Times of one step by arithmetic: products over peak rate, bytes over bandwidth, at the shares that
    `[plan]` assumes. Sessions have equal length here; real ones with a long tail decode slower."""
    plan, rl = config.plan, config.rl
    processes = Processes.of(config, place.device)
    trained = rl.groups_per_step * rl.group_size
    begun = 1 + rl.extra_members / rl.group_size
    sampled = plan_sampling(config, sizes, place, rates, processes, trained / plan.useful_share * begun)
    trained_tokens = trained * plan.session_tokens
    passes = 1 + _BACKWARD + config.activation_checkpointing + rl.loss.needs_proximal
    train_flops = passes * trained_tokens * sizes.forward_flops(plan.session_tokens / 2)
    ranks = 1 if processes.on_one_machine else config.parallel.ranks
    every = config.evaluation.every_steps
    # An evaluation has an engine and sandboxes of its own.
    judging = replace(processes, engines=1, borrowed=0.0, elsewhere=0, workers=0)
    price, num_judged = rl.reward.price, config.evaluation.num_tasks

    def sample_s(sessions: float, where: Processes) -> float:
        return plan_sampling(config, sizes, place, rates, where, sessions).wall_s

    samples_elsewhere = processes.elsewhere > 0 and not config.clusters.local_sessions
    return StepTimes(
        sampled=sampled,
        trained_tokens=trained_tokens,
        train_s=train_flops / (rates.flops_per_s * plan.training_share) / ranks,
        publication=plan_publication(config, sizes, place, rates, processes),
        validation_s=sample_s(price.validation_tasks, processes) / price.validate_every
        if rl.validation_sessions
        else 0.0,
        evaluation_s=2 * sample_s(num_judged, judging) if every else 0.0,  # greedily and at temperature 1
        evaluations=1 / every if every else 0.0,
        is_beside=rl.max_staleness > 0,
        overlapped=overlaps_publication(config),
        shares_cores=(processes.on_one_machine or not processes.apart) and not samples_elsewhere,
    )


def price_per_hour(config: RunConfig, processes: Processes) -> float:
    """Price of everything that the run uses, as far as `[plan]` gives prices."""
    plan = config.plan
    workers = 0 if processes.on_one_machine else processes.workers
    return (
        processes.devices * plan.price_per_hour
        + processes.borrowed * plan.borrowed_price_per_hour
        + workers * plan.worker_price_per_hour
    )
