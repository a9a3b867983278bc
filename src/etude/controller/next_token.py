"""Next-token training on several ranks, as one trainer.

    documents: the first rank's mixture draws ──all of a step──> every rank: its share ──> sums of gradients
    checkpoints: every rank writes its shards, the first one the mixture's place beside them

Which documents a step has does not depend on the number of ranks, and neither does what is counted of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.config import ModelConfig, NextTokenConfig, RunConfig
from etude.controller.ranks import ModelPlan, OnlyHere, Rank, Ranked, open_team
from etude.model import LanguageModel
from etude.training import NextTokenTrainer
from etude.training.checkpoints import read_state
from etude.training.optimizer import OffendingBatches
from etude.training.parallel.team import Team
from etude.training.pretraining import Batches, Document
from etude.training.pretraining.trainer import DraftTraining

if TYPE_CHECKING:
    from etude.training.parallel.mesh_ranks import MeshRanks


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every rank makes its trainer from."""

    model: ModelPlan
    config: NextTokenConfig
    drafts: DraftTraining | None
    """It travels as the first rank has it."""
    offending: Path
    asynchronous: bool


class NextTokenRank(Rank[NextTokenTrainer]):
    """Trains on what the first rank draws, who alone has `batches`."""

    def __init__(
        self, ranks: MeshRanks, plan: _Plan, model: OnlyHere[LanguageModel], batches: OnlyHere[Batches]
    ) -> None:
        """`model` and `batches`: the first rank's."""
        own = plan.model.place(model, ranks)
        keep = plan.config.optimizer.keep_offending
        offending = OffendingBatches(plan.offending, keep, ranks.peers.rank)
        trainer = NextTokenTrainer(own, batches.value, plan.config, plan.drafts, ranks, offending)
        super().__init__(trainer, asynchronous=plan.asynchronous)


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
        """Spreads `model` over the team; from then on it is a part of itself. Raises ConfigError if it cannot
        be spread."""
        self._batches = batches
        plan = _Plan(ModelPlan.of(model), config, drafts, offending, run.checkpoint.asynchronous)
        super().__init__(team, team.make(NextTokenRank, plan, OnlyHere(model), OnlyHere(batches)))

    @property
    def model(self) -> LanguageModel:
        """The first rank's part of it: its weights are not whole, its configuration is."""
        return self.trainer.model

    @property
    def num_steps_taken(self) -> int:
        return self.trainer.num_steps_taken

    @property
    def finished(self) -> bool:
        return self.trainer.finished

    def step(self) -> Mapping[str, float]:
        return self._do(NextTokenTrainer.step, self._batches.draw())

    def evaluate(self, documents: Sequence[Document]) -> float:
        return self._do(NextTokenTrainer.evaluate, documents)

    def set_context(self, config: ModelConfig) -> None:
        self._do(NextTokenTrainer.set_context, config)

    def whole_model(self) -> LanguageModel:
        return self._do(NextTokenTrainer.whole_model)

    def restore(self, directory: Path) -> None:
        """See NextTokenTrainer. Every rank reads the directory."""
        # Only the first rank has documents: that they are others must not look like a rank that fails alone.
        state = (read_state(directory) or {}).get("trainer", {})
        if "batches" in state:
            self._batches.load_state_dict(state["batches"])
        self._do(NextTokenTrainer.restore, directory)


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
    """A trainer on as many ranks as the run has; the others are let go on the way out.

    `offending`: directory of batches whose gradient was not finite. Raises RankError if the others do not
    come, ConfigError if the model cannot be spread.
    """
    if run.parallel.ranks == 1:
        kept = OffendingBatches(offending, config.optimizer.keep_offending)
        yield NextTokenTrainer(model, batches, config, drafts, offending=kept)
        return
    with open_team(model, run) as team:
        yield RankedNextTokenTrainer(team, model, batches, config, run, drafts, offending)
