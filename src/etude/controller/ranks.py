"""The RL trainer on several ranks, as one Trainer.

    loop ──> RankedTrainer ──groups, routes──> RlTrainer of every rank ──> sums of gradients ──> same update
                 └─────────── metrics, checkpoints, commits: the first rank's

The first rank is the run's own process; it collects, logs and saves. To a weight store every rank publishes
its own parts, and the first one commits; anywhere else the first one publishes all. The others see nothing
but what it hands on, so they need neither the run's sandboxes nor its engine.
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

from etude.config import ModelConfig, RlConfig, RunConfig, WeightsConfig
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
from etude.training.checkpoints import FollowingWriter, WriteCheckpoint, save_checkpoint
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
    """All routes that a step on these groups replays, for a trainer that takes it elsewhere."""
    segments = [s for group in groups for member in group.members for s in member.segments]
    return {s.routes.url: fetch(s.routes) for s in segments if s.routes is not None}


class StepRoutes:
    """The expert routes that came with the step at hand."""

    def __init__(self) -> None:
        self._routes: Routes = {}

    @contextlib.contextmanager
    def given(self, routes: Routes) -> Iterator[None]:
        """Within it the step goes on that these came with."""
        self._routes = routes
        try:
            yield
        finally:
            self._routes = {}

    def fetch(self, ref: BlobRef) -> NDArray[Any]:
        """Raises StoreError for those that did not come."""
        if ref.url not in self._routes:
            raise StoreError("these routes did not come with the step", field="routes", received=ref.url)
        return self._routes[ref.url]


class OnlyHere(Generic[T]):
    """Something that does not travel: on every other rank it holds None."""

    def __init__(self, value: T | None = None) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[OnlyHere[T]], tuple[()]]:
        return OnlyHere, ()


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What every rank makes its model from."""

    architecture: ModelConfig
    vocab_size: int
    dtype: torch.dtype
    ops: Ops
    recompute: bool
    """Activation checkpointing: what one rank computes again in its backward pass, all must."""
    unread: Path | None
    """Where each rank reads its part of the weights; None: the first one has them all, and sends them."""

    @staticmethod
    def of(model: LanguageModel) -> ModelPlan:
        """For models like this one."""
        recompute, dtype = block_of(model, 0).recompute, model.embedding.dtype
        return ModelPlan(model.config, model.vocab_size, dtype, model.ops, recompute, model.unread)

    def place(self, model: OnlyHere[LanguageModel], ranks: MeshRanks) -> LanguageModel:
        """This rank's part of the first rank's `model`. Collective. Raises CheckpointError where it cannot be
        read."""
        own = model.value
        if own is None:
            with torch.device("meta"):
                own = LanguageModel(self.architecture, self.vocab_size).cast(self.dtype)
        own.unread = self.unread
        own.ops = self.ops
        own.checkpoint_activations(self.recompute)
        ranks.place(own)
        return own


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """What every rank makes its trainer from."""

    model: ModelPlan
    config: RlConfig
    lineage: str
    offending: Path
    asynchronous: bool
    """Whether checkpoints are written while training goes on."""
    weights: WeightsConfig | None
    """The store that every rank publishes its parts to; None: the first one publishes all."""
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Saving:
    """What goes into a checkpoint beside the trainer's own, and how it is written: the first rank's."""

    extra: Mapping[str, Any] | None
    write: WriteCheckpoint


class Rank(Generic[TrainerT]):
    """One rank's trainer."""

    def __init__(self, trainer: TrainerT, *, asynchronous: bool) -> None:
        """`asynchronous`: whether checkpoints are written while training goes on."""
        self.trainer = trainer
        self._writer = FollowingWriter(asynchronous=asynchronous)

    def do(self, method: Callable[..., T], *arguments: Any) -> T:
        """Calls a method of the trainer's class."""
        return method(self.trainer, *arguments)

    def save(self, directory: Path, saving: OnlyHere[Saving], at_once: bool) -> None:
        """Saves what the first rank saves. `at_once`: all wait until all is on disk."""
        how = saving.value or Saving(None, save_checkpoint if at_once else self._writer)
        self.trainer.save(directory, how.extra, how.write)


class Ranked(Generic[TrainerT, RankT]):
    """A trainer over a team. Every method is a step of all ranks, and raises RankError where one is lost,
    besides what the trainer raises; the last checkpoint is whole."""

    def __init__(self, team: Team[RankT], own: RankT) -> None:
        """`own`: the first rank's."""
        self._team = team
        self._own = own

    @property
    def trainer(self) -> TrainerT:
        """The first rank's."""
        return self._own.trainer

    def save(
        self,
        directory: Path,
        extra: Mapping[str, Any] | None = None,
        write: WriteCheckpoint = save_checkpoint,
    ) -> None:
        """Writes the resumable checkpoint: see RlTrainer.save."""
        self._team.call(Rank.save, directory, OnlyHere(Saving(extra, write)), write is save_checkpoint)

    def _do(self, method: Callable[..., T], *arguments: Any) -> T:
        """Has every rank's trainer do the same; returns what the first one's does."""
        return self._team.call(Rank.do, method, *arguments)


class RankTrainer(Rank[RlTrainer]):
    """With the routes that the step at hand needs."""

    def __init__(
        self,
        ranks: MeshRanks,
        plan: TrainerPlan,
        model: OnlyHere[LanguageModel],
        weights: OnlyHere[WeightPublisher],
    ) -> None:
        """`model` and `weights`: the first rank's, which all start from and which it publishes to."""
        own = plan.model.place(model, ranks)
        self._weights = _open_weights(plan.weights, weights.value, ranks)
        self._routes = StepRoutes()
        keep, config = plan.config.optimizer.keep_offending, plan.config
        trainer = RlTrainer(
            own,
            config,
            plan.lineage,
            self._weights,
            self._routes.fetch,
            ranks=ranks,
            offending=OffendingBatches(plan.offending, keep, ranks.peers.rank),
            **plan.options,
        )
        super().__init__(trainer, asynchronous=plan.asynchronous)

    def step(self, groups: Sequence[Group], routes: Routes) -> Mapping[str, float]:
        with self._routes.given(routes):
            return self.trainer.step(groups)

    def flush(self) -> None:
        """Waits until what was published is committed."""
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
        """Spreads `model` over the team; from then on it is a part of itself. For the rest see
        `open_trainer`.

        Raises ConfigError if it cannot be spread.
        """
        self._fetch_routes = fetch_routes
        self._has_store = isinstance(weights, StoreWeights)
        plan = TrainerPlan(
            ModelPlan.of(model),
            run.rl,
            run.name,
            offending,
            run.checkpoint.asynchronous,
            run.weights if self._has_store else None,
            options,
        )
        super().__init__(team, team.make(RankTrainer, plan, OnlyHere(model), OnlyHere(weights)))

    @property
    def model(self) -> LanguageModel:
        """The first rank's part of it: its weights are not whole, its configuration is."""
        return self.trainer.model

    def whole_model(self) -> LanguageModel:
        return self._do(RlTrainer.whole_model)

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
        return self._do(RlTrainer.publish)

    def flush(self) -> None:
        """Waits until what was published to a store is committed. Raises StoreError if it could not be."""
        if self._has_store:
            self._team.call(RankTrainer.flush)

    def score(
        self, sequences: Sequence[NDArray[np.int32]], routes: Sequence[NDArray[Any]] | None = None
    ) -> list[Scores]:
        return self._do(RlTrainer.score, sequences, routes)

    def restore(self, directory: Path) -> None:
        """See RlTrainer.restore. Every rank reads the directory."""
        self._do(RlTrainer.restore, directory)


AnyTrainer = RlTrainer | RankedTrainer


class _NoPublisher:
    """What ranks publish to that nobody fetches from. Implements WeightPublisher."""

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher: names nothing."""
        return WeightManifest(version, (), "")


def _open_weights(
    config: WeightsConfig | None, given: WeightPublisher | None, ranks: MeshRanks
) -> WeightPublisher:
    """Where a rank publishes; `given`: the first rank's."""
    if config is None:
        return given or _NoPublisher()
    if given is None:
        return open_publisher(config, ranks.peers)
    assert isinstance(given, StoreWeights), "TrainerPlan.weights says so"
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
    """The RL trainer of a run, on as many ranks as it has; the others are let go on the way out.

    Under `torchrun` they are those that it started, otherwise they are started here, on this machine, and
    share its cores. `offending`: directory of batches whose gradient was not finite. `options`: what else
    RlTrainer takes; it travels to every rank. Raises RankError if the others do not come, ConfigError if the
    model cannot be spread or its routers cannot do what is asked.
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
    """The ranks of a run that has several, which are let go on the way out; see `open_trainer`."""
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
    """Whether this process is one that `torchrun` started to follow the first; if so, it has, to the end.

    Raises RankError if others fail, ConfigError where the configuration names another number of ranks.
    """
    check_world(run.parallel)
    if not is_follower():
        return False
    Team.follow(run.parallel, choose_device(run.device, run.numerics))
    return True
