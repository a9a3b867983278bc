"""The RL trainer distributed over several ranks, as one Trainer.

    loop ──> RankedTrainer ──groups, routes──> RlTrainer of every rank ──> sums of gradients ──> same update
                 └─────────── metrics, checkpoints, commits: the first rank's

The first rank is the run's own process; it collects, logs and saves. To a weight store every rank publishes
its own shards, and the first one commits; otherwise the first one publishes all. The other ranks get all
inputs from the first, so they need neither the run's sandboxes nor its engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig, RunConfig, WeightsConfig
from etude.controller.compute import choose_device
from etude.controller.models import check_routing
from etude.errors import EtudeError, StoreError
from etude.model import LanguageModel, block_of
from etude.model.huggingface import check_memory
from etude.model.lora import Adapters
from etude.model.ops import Ops
from etude.model.scoring import device_of
from etude.records import BlobRef, Group, PolicyVersion, Scores, WeightManifest
from etude.training import NextTokenTrainer, RlTrainer
from etude.training.checkpoints import FollowerWriter, WriteCheckpoint, save_checkpoint
from etude.training.intake import RouteFetcher
from etude.training.optimizer import OffendingBatches
from etude.training.parallel.team import Team, check_world, is_follower
from etude.weights import StoreWeights, WeightPublisher, open_publisher

if TYPE_CHECKING:
    from etude.training.parallel.mesh_ranks import MeshRanks

T = TypeVar("T")
TrainerT = TypeVar("TrainerT", bound=RlTrainer | NextTokenTrainer)
RankT = TypeVar("RankT", bound="Rank[Any]")

Routes = Mapping[str, NDArray[Any]]
"""Arrays by the URL of their reference."""


def routes_of(groups: Sequence[Group], fetch: RouteFetcher) -> Routes:
    """All expert routes that a step on these groups replays, for a trainer in another process."""
    segments = [s for group in groups for member in group.members for s in member.segments]
    return {s.routes.url: fetch(s.routes) for s in segments if s.routes is not None}


class StepRoutes:
    """The expert routes that were passed with the current step."""

    def __init__(self) -> None:
        self._routes: Routes = {}

    @contextlib.contextmanager
    def using(self, routes: Routes) -> Iterator[None]:
        """Context of the step that these routes were passed with."""
        self._routes = routes
        try:
            yield
        finally:
            self._routes = {}

    def fetch(self, ref: BlobRef) -> NDArray[Any]:
        """Finds routes of the current step. Raises StoreError for others."""
        if ref.url not in self._routes:
            raise StoreError("these routes did not come with the step", field="routes", received=ref.url)
        return self._routes[ref.url]


class FirstRankOnly(Generic[T]):
    """A value that is not sent to other ranks: there it is None."""

    def __init__(self, value: T | None = None) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[FirstRankOnly[T]], tuple[()]]:
        return FirstRankOnly, ()


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The first rank's model, and the settings from which the other ranks make theirs."""

    model: FirstRankOnly[LanguageModel]
    architecture: ModelConfig
    vocab_size: int
    dtype: torch.dtype
    ops: Ops
    recompute: bool
    """Activation checkpointing: all ranks must recompute the same activations in the backward pass."""
    unread: Path | None
    """Directory from which each rank reads its shards; None: the first rank has all, and sends them."""

    @staticmethod
    def of(model: LanguageModel) -> ModelPlan:
        """The plan of this model, which becomes the first rank's shard."""
        recompute, dtype, own = block_of(model, 0).recompute, model.embedding.dtype, FirstRankOnly(model)
        return ModelPlan(own, model.config, model.vocab_size, dtype, model.ops, recompute, model.unread)

    def place(self, ranks: MeshRanks) -> LanguageModel:
        """This rank's shard of the model. Collective. Raises CheckpointError."""
        own = self.model.value
        if own is None:
            with torch.device("meta"):
                own = LanguageModel(self.architecture, self.vocab_size).cast(self.dtype)
        own.unread = self.unread
        own.ops = self.ops
        own.checkpoint_activations(self.recompute)
        ranks.place(own)
        return own


class Rank(Generic[TrainerT]):
    """One rank's trainer."""

    def __init__(self, trainer: TrainerT, *, asynchronous: bool) -> None:
        """`asynchronous`: whether checkpoints are written while training continues."""
        self.trainer = trainer
        self._writer = FollowerWriter(asynchronous=asynchronous)

    def call_trainer(self, method: Callable[..., T], *arguments: Any) -> T:
        """Calls a method of the trainer's class."""
        return method(self.trainer, *arguments)

    def save(
        self,
        directory: Path,
        extra: FirstRankOnly[Mapping[str, Any]],
        write: FirstRankOnly[WriteCheckpoint],
        at_once: bool,
    ) -> None:
        """Saves this rank's part of a checkpoint. `extra`, `write`: contents besides the trainer's own, and
        the writer. `at_once`: all ranks wait until everything is on disk."""
        own = write.value or (save_checkpoint if at_once else self._writer)
        self.trainer.save(directory, extra.value, own)


class Ranked(Generic[TrainerT, RankT]):
    """A trainer over a team. Every method is collective: it runs on all ranks, and raises RankError where one
    is lost, besides what the trainer raises; the last checkpoint stays intact."""

    def __init__(self, team: Team[RankT], own: RankT) -> None:
        """`own`: the first rank's."""
        self._team = team
        self._own = own

    @property
    def trainer(self) -> TrainerT:
        """The first rank's."""
        return self._own.trainer

    @property
    def model(self) -> LanguageModel:
        """The first rank's shard: its weights are a part, its configuration is complete."""
        return self.trainer.model

    def save(
        self,
        directory: Path,
        extra: Mapping[str, Any] | None = None,
        write: WriteCheckpoint = save_checkpoint,
    ) -> None:
        """Writes the resumable checkpoint: see RlTrainer.save."""
        own = FirstRankOnly(extra), FirstRankOnly(write)
        self._team.call(Rank.save, directory, *own, write is save_checkpoint)

    def _call_ranks(self, method: Callable[..., T], *arguments: Any) -> T:
        """Calls a method of every rank's trainer; returns the first rank's result."""
        return self._team.call(Rank.call_trainer, method, *arguments)


class RankTrainer(Rank[RlTrainer]):
    """One rank's RL trainer, with the expert routes of the current step."""

    def __init__(
        self,
        ranks: MeshRanks,
        plan: ModelPlan,
        run: RunConfig,
        weights: FirstRankOnly[WeightPublisher],
        has_store: bool,
        offending: Path,
        options: Mapping[str, Any],
    ) -> None:
        """`weights`: to which the first rank publishes. `has_store`: whether every rank publishes its shards
        to the run's store; otherwise the first one publishes all."""
        own = plan.place(ranks)
        self._weights = _open_weights(run.weights if has_store else None, weights.value, ranks)
        self._routes = StepRoutes()
        trainer = RlTrainer(
            own,
            run.rl,
            run.name,
            self._weights,
            self._routes.fetch,
            ranks=ranks,
            offending=OffendingBatches(offending, run.rl.optimizer.keep_offending, ranks.peers.rank),
            **options,
        )
        super().__init__(trainer, asynchronous=run.checkpoint.asynchronous)

    def step(self, groups: Sequence[Group], routes: Routes) -> Mapping[str, float]:
        with self._routes.using(routes):
            return self.trainer.step(groups)

    def flush(self) -> None:
        """Waits until published versions are committed."""
        if isinstance(self._weights, StoreWeights):
            self._weights.flush()


class RankedTrainer(Ranked[RlTrainer, RankTrainer]):
    """Implements Trainer over a team."""

    def __init__(
        self,
        team: Team[RankTrainer],
        model: LanguageModel,
        run: RunConfig,
        weights: WeightPublisher,
        fetch_routes: RouteFetcher,
        offending: Path,
        options: Mapping[str, Any],
    ) -> None:
        """Shards `model` over the team, in place: it becomes the first rank's shard. For the other arguments
        see `open_trainer`.

        Raises ConfigError if it cannot be sharded.
        """
        self._fetch_routes = fetch_routes
        self._has_store = isinstance(weights, StoreWeights)
        arguments = run, FirstRankOnly(weights), self._has_store, offending, options
        super().__init__(team, team.make(RankTrainer, ModelPlan.of(model), *arguments))

    def whole_model(self) -> LanguageModel:
        return self._call_ranks(RlTrainer.whole_model)

    @property
    def version(self) -> PolicyVersion:
        return self.trainer.version

    @property
    def adapters(self) -> Adapters | None:
        """See RlTrainer.adapters: equal on every rank."""
        return self.trainer.adapters

    def step(self, groups: Sequence[Group]) -> Mapping[str, float]:
        return self._team.call(RankTrainer.step, groups, routes_of(groups, self._fetch_routes))

    def publish(self) -> WeightManifest:
        return self._call_ranks(RlTrainer.publish)

    def flush(self) -> None:
        """Waits until versions published to a store are committed. Raises StoreError if that failed."""
        if self._has_store:
            self._team.call(RankTrainer.flush)

    def score(
        self, sequences: Sequence[NDArray[np.int32]], routes: Sequence[NDArray[Any]] | None = None
    ) -> list[Scores]:
        return self._call_ranks(RlTrainer.score, sequences, routes)

    def restore(self, directory: Path) -> None:
        """See RlTrainer.restore. Every rank reads the directory."""
        self._call_ranks(RlTrainer.restore, directory)


AnyTrainer = RlTrainer | RankedTrainer


class _NoPublisher:
    """Discards what ranks other than the first publish. Implements WeightPublisher."""

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher. The manifest is empty."""
        return WeightManifest(version, (), "")


def _open_weights(
    config: WeightsConfig | None, given: WeightPublisher | None, ranks: MeshRanks
) -> WeightPublisher:
    """The publisher of a rank; `given`: the first rank's."""
    if config is None:
        return given or _NoPublisher()
    if given is None:
        return open_publisher(config, ranks.peers)
    assert isinstance(given, StoreWeights), "the first rank says so"
    given.join(ranks.peers)
    return given


@contextlib.contextmanager
def open_trainer(
    model: LanguageModel,
    run: RunConfig,
    weights: WeightPublisher,
    fetch_routes: RouteFetcher,
    offending: Path,
    **options: Any,
) -> Iterator[AnyTrainer]:
    """Opens the RL trainer of a run on its number of ranks; ends the other ranks at exit.

    Under `torchrun` they are those that it started; otherwise they are started here, on this machine, and
    share its cores. `offending`: directory of batches whose gradient was not finite. `options`: further
    arguments of RlTrainer, sent to every rank. Raises RankError if other ranks do not join, ConfigError if
    the model cannot be sharded or its routers do not support the configuration.
    """
    check_routing(run, model)
    if run.parallel.ranks == 1:
        kept = OffendingBatches(offending, run.rl.optimizer.keep_offending)
        yield RlTrainer(model, run.rl, run.name, weights, fetch_routes, offending=kept, **options)
        return
    with open_team(model, run) as team:
        trainer = RankedTrainer(team, model, run, weights, fetch_routes, offending, options)
        try:
            yield trainer
        except BaseException:
            with contextlib.suppress(EtudeError):  # the first error counts
                trainer.flush()
            raise
        trainer.flush()


@contextlib.contextmanager
def open_team(model: LanguageModel, run: RunConfig) -> Iterator[Team[Any]]:
    """Opens the ranks of a run that has several; ends them at exit. See `open_trainer`."""
    from etude.training.parallel.mesh_ranks import check_spreadable

    check_spreadable(model)
    device = run.device if model.unread is not None else device_of(model).type
    threads = max(1, torch.get_num_threads() // run.parallel.ranks)
    team = Team.join(run.parallel, device)
    if team is None:
        if device == "cpu":
            check_memory(model)
        team = Team.spawn(run.parallel, device, threads)
    try:
        yield team
    finally:
        team.close()


def follow_torchrun(run: RunConfig) -> bool:
    """Serves the first rank until the run's end, if `torchrun` started this process as another rank; returns
    whether it did.

    Raises RankError if others fail, ConfigError where the configuration has another number of ranks.
    """
    check_world(run.parallel)
    if not is_follower():
        return False
    Team.follow(run.parallel, choose_device(run.device, run.numerics))
    return True
