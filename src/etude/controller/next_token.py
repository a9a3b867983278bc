"""Next-token training distributed over several ranks, as one trainer.

    documents: the first rank's mixture draws ──all of a step──> every rank: its share ──> sums of gradients
    checkpoints: every rank writes its shards, the first one also the mixture's state

The documents of a step, and their counts, do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from etude.config import ModelConfig, NextTokenConfig, RunConfig
from etude.controller.ranks import FirstRankOnly, ModelPlan, Rank, Ranked, open_team
from etude.model import LanguageModel
from etude.training import NextTokenTrainer
from etude.training.checkpoints import read_state
from etude.training.optimizer import OffendingBatches
from etude.training.parallel.team import Team
from etude.training.pretraining import Batches, Document
from etude.training.pretraining.trainer import DraftTraining

if TYPE_CHECKING:
    from etude.training.parallel.mesh_ranks import MeshRanks


class NextTokenRank(Rank[NextTokenTrainer]):
    """One rank's trainer: it trains on the batches that the first rank draws."""

    def __init__(
        self,
        ranks: MeshRanks,
        plan: ModelPlan,
        batches: FirstRankOnly[Batches],
        config: NextTokenConfig,
        drafts: DraftTraining | None,
        offending: Path,
        asynchronous: bool,
    ) -> None:
        """`drafts`: sent to every rank by the first."""
        own = plan.place(ranks)
        kept = OffendingBatches(offending, config.optimizer.keep_offending, ranks.peers.rank)
        trainer = NextTokenTrainer(own, batches.value, config, drafts, ranks, kept)
        super().__init__(trainer, asynchronous=asynchronous)


class RankedNextTokenTrainer(Ranked[NextTokenTrainer, NextTokenRank]):
    """A NextTokenTrainer over a team."""

    def __init__(
        self,
        team: Team[NextTokenRank],
        model: LanguageModel,
        batches: Batches,
        config: NextTokenConfig,
        run: RunConfig,
        drafts: DraftTraining | None,
        offending: Path,
    ) -> None:
        """Shards `model` in place: it becomes the first rank's shard. Raises ConfigError if it cannot."""
        self._batches = batches
        arguments = FirstRankOnly(batches), config, drafts, offending, run.checkpoint.asynchronous
        super().__init__(team, team.make(NextTokenRank, ModelPlan.of(model), *arguments))

    @property
    def num_steps_taken(self) -> int:
        return self.trainer.num_steps_taken

    @property
    def finished(self) -> bool:
        return self.trainer.finished

    def step(self) -> Mapping[str, float]:
        return self._call_ranks(NextTokenTrainer.step, self._batches.draw())

    def evaluate(self, documents: Sequence[Document]) -> float:
        return self._call_ranks(NextTokenTrainer.evaluate, documents)

    def set_context(self, config: ModelConfig) -> None:
        self._call_ranks(NextTokenTrainer.set_context, config)

    def whole_model(self) -> LanguageModel:
        return self._call_ranks(NextTokenTrainer.whole_model)

    def restore(self, directory: Path) -> None:
        """See NextTokenTrainer. Every rank reads the directory."""
        # Only the first rank has documents. Other ones than before are its own error, not a lost rank's.
        state = (read_state(directory) or {}).get("trainer", {})
        if "batches" in state:
            self._batches.load_state_dict(state["batches"])
        self._call_ranks(NextTokenTrainer.restore, directory)


AnyNextTokenTrainer = NextTokenTrainer | RankedNextTokenTrainer


@contextlib.contextmanager
def open_next_token_trainer(
    model: LanguageModel,
    batches: Batches,
    config: NextTokenConfig,
    run: RunConfig,
    drafts: DraftTraining | None,
    offending: Path,
) -> Iterator[AnyNextTokenTrainer]:
    """Opens a trainer on the run's number of ranks; ends the other ranks at exit.

    `offending`: directory of batches whose gradient was not finite. Raises RankError if other ranks do not
    join, ConfigError if the model cannot be sharded.
    """
    if run.parallel.ranks == 1:
        kept = OffendingBatches(offending, config.optimizer.keep_offending)
        yield NextTokenTrainer(model, batches, config, drafts, offending=kept)
        return
    with open_team(model, run) as team:
        yield RankedNextTokenTrainer(team, model, batches, config, run, drafts, offending)
