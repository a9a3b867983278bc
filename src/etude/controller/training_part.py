"""The part of a run that trains and writes checkpoints, in whichever process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from etude.agent import open_renderer
from etude.config import RunConfig
from etude.controller.ranks import Routes, StepRoutes, open_trainer
from etude.controller.thread_choice import ThreadChoice
from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.model.peft import save_peft
from etude.observe import MetricSink, Observer, RunDirectory
from etude.records import Group, PolicyVersion, Scores, WeightManifest
from etude.tokens.tokenizer import Tokenizer
from etude.training import RlTrainer, save_checkpoint
from etude.training.checkpoints import CheckpointKeeper
from etude.training.feedback import open_feedback
from etude.training.intake import RouteFetcher
from etude.weights import WeightPublisher

LATEST = "latest"
"""The newest resumable checkpoint, among a run's checkpoints."""
OFFENDING = "offending"
"""Directory of a run with batches whose gradient was not finite."""


class TrainingPart:
    """A Trainer with its checkpoints. A context manager: at exit it ends the other ranks, and waits for the
    checkpoint that is being written."""

    def __init__(
        self,
        config: RunConfig,
        model: AnyModel,
        tokenizer: Tokenizer,
        run: RunDirectory,
        weights: WeightPublisher,
        metrics: MetricSink,
        observer: Observer,
        fetch_routes: RouteFetcher | None = None,
    ) -> None:
        """`fetch_routes`: finds expert routes; None: they are passed with each step."""
        self._config = config
        self._latest = run.checkpoints / LATEST
        self._tokenizer = tokenizer
        self._observer = observer
        self._routes = StepRoutes()
        with contextlib.ExitStack() as stack:
            self._trainer = stack.enter_context(
                open_trainer(
                    cast(LanguageModel, model),  # any architecture learns through the same packed scoring
                    config,
                    weights,
                    fetch_routes or self._routes.fetch,
                    run.path / OFFENDING,
                    feedback=open_feedback(config.rl.feedback, open_renderer(tokenizer, config.agent)),
                )
            )
            self._keeper = stack.enter_context(
                CheckpointKeeper(self._latest, config.checkpoint, metrics, observer)
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> TrainingPart:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    # ---- Trainer --------------------------------------------------------------------------------

    @functools.cached_property
    def _threads(self) -> ThreadChoice:
        """Made at the first step, when the compute threads of this part are set."""
        model = self._trainer.model
        return ThreadChoice(self._config, model, "reinforcement learning", self._observer.say)

    @property
    def version(self) -> PolicyVersion:
        return self._trainer.version

    def step(self, groups: Sequence[Group], routes: Routes | None = None) -> Mapping[str, float]:
        """See Trainer.step. `routes`: of the groups, where the call comes from another process."""
        with self._routes.using(routes or {}):
            return self._threads.step(lambda: self._trainer.step(groups))

    def offload_states(self) -> None:
        """See RlTrainer.offload_states. Of one rank only."""
        assert isinstance(self._trainer, RlTrainer), "RunConfig allows colocated runs one rank"
        self._trainer.offload_states()

    def publish(self) -> WeightManifest:
        return self._trainer.publish()

    def score(
        self, sequences: Sequence[NDArray[np.int32]], routes: Sequence[NDArray[Any]] | None = None
    ) -> list[Scores]:
        return self._trainer.score(sequences, routes)

    def restore(self, directory: Path) -> None:
        self._trainer.restore(directory)

    # ---- checkpoints ----------------------------------------------------------------------------

    def current_version(self) -> PolicyVersion:
        """`version`, as a method that a Handle can call."""
        return self.version

    def is_due(self) -> bool:
        """Whether the next periodic checkpoint is due."""
        return self._keeper.due

    def save(self, extra: Mapping[str, Any]) -> None:
        """Begins to write the resumable checkpoint, with the loop's values `extra`; it is on disk at the
        latest after `flush`."""
        self._trainer.save(self._latest, extra, self._keeper.write)

    def flush(self) -> None:
        """See CheckpointKeeper.flush."""
        self._keeper.flush()

    def save_model(self, directory: Path, with_tokenizer: bool = False) -> None:
        """Writes the current weights, adapters merged."""
        trainer, write_more = self._trainer, self._tokenizer.save if with_tokenizer else None
        with contextlib.nullcontext() if trainer.adapters is None else trainer.adapters.merged():
            save_checkpoint(directory, trainer.whole_model(), write_more=write_more)

    def save_adapters(self, directory: Path, base: str) -> None:
        """Writes the adapters alone, if there are any, for use with the model at `base`."""
        if self._trainer.adapters is None:
            return
        try:
            save_peft(self._trainer.adapters, self._trainer.whole_model(), directory, base)
        except CheckpointError as error:
            self._observer.say(f"the adapters cannot be written for the peft library: {error}")
