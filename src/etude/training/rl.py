"""The RL step: policy gradients on graded groups, exact about what was sampled.

groups -> prepare_groups (checked, nothing changed yet) -> split_updates
          for the 2nd update on, where the loss or R2 asks for it: old policy's logprobs and routes
          per update: micro-batches -> forward (routes replayed) -> policy_loss -> backward; optimiser
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import RlConfig
from etude.errors import CheckpointError, ConfigError
from etude.model import LanguageModel, RouterStatistics
from etude.model.loading import AnyModel
from etude.model.lora import Adapters
from etude.model.scoring import PackedSequences, device_of, packed_logprobs, score_sequences, shared_tokens
from etude.records import Group, PolicyVersion, Scores, WeightManifest
from etude.training.batches import TrainingSequence, Update, describe_batch, split_updates
from etude.training.checkpoints import (
    ModelShards,
    WriteCheckpoint,
    load_stored,
    save_checkpoint,
    without_model,
)
from etude.training.feedback import Feedback, StepFeedback
from etude.training.intake import ModelLimits, RouteFetcher, prepare_groups
from etude.training.loss import Rows, policy_loss
from etude.training.meter import StepMeter
from etude.training.optimizer import OffendingBatches, Optimizer
from etude.training.packing import pack_sequences
from etude.training.parallel.ranks import Ranks, Share, SingleRank
from etude.training.replay import replayed_routes, with_old_policy
from etude.training.threads import add_gradients, count_batches, map_in_order, share_threads, splits_batches
from etude.weights import StoreWeights, WeightPublisher


class RlTrainer:
    """Implements the Trainer protocol for one process, or for one of several ranks."""

    def __init__(
        self,
        model: LanguageModel,
        config: RlConfig,
        lineage: str,
        weights: WeightPublisher,
        fetch_routes: RouteFetcher,
        ranks: Ranks | None = None,
        offending: OffendingBatches | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        """`lineage` names the run; version 0 is the model as given. `ranks`: the processes that train the
        model together; each is given the same groups. `offending`: stores batches whose gradient is not
        finite. `feedback`: required if `rl.feedback.weight` is above 0."""
        if config.feedback.weight > 0 and feedback is None:
            raise ConfigError(
                "textual feedback needs the renderer of the run's sessions",
                field="rl.feedback.weight",
                received=config.feedback.weight,
                fix="give RlTrainer the Feedback that open_feedback makes",
            )
        self._feedback = feedback if config.feedback.weight > 0 else None
        self.model = model
        self._config = config
        self._weights = weights
        self._fetch_routes = fetch_routes
        self._ranks: Ranks = ranks or SingleRank()
        num_updates = config.num_steps * config.updates_per_step
        self._reference = self._make_reference() if config.loss.kl_weight > 0 else None
        self.adapters = Adapters(model, config.adapter) if config.adapter.rank else None
        """The trained adapters; None if the model itself is trained."""
        self._trainable = self.adapters or model
        self._splits_batches = splits_batches(model, self._ranks)
        self._optimizer = Optimizer(self._trainable, config.optimizer, num_updates, self._ranks, offending)
        self._version = PolicyVersion(lineage, 0, adapter=None if self.adapters is None else lineage)
        self._published: dict[int, str] = {}
        """Digests of the earlier versions of this lineage, by step."""

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def step(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """See Trainer.step. Metrics: means over trained tokens, times in seconds, `skipped_*` counts.

        Raises ConfigError for groups that cannot be trained on, before anything has changed.
        """
        with share_threads(split=self._splits_batches) as num_threads:
            return self._step(groups, num_threads)

    def _step(self, groups: Sequence[Group], num_threads: int) -> Mapping[str, float]:
        began = time.perf_counter()
        limits = ModelLimits.of(self.model)
        prepared, skipped = prepare_groups(
            groups, self._config, limits, self._version, self._fetch_routes, self._published
        )
        updates = split_updates(prepared, self._config.loss, self._config.updates_per_step)
        meter = StepMeter(updates)
        updates = [[s for s in update if self._has_gradient(s)] for update in updates]
        feedback = StepFeedback(self._feedback, groups, limits.max_positions, len(updates))
        updates[1:] = [self._with_old_policy(update, num_threads) for update in updates[1:]]
        for number, update in enumerate(updates):
            if update or feedback.examples[number]:
                self._update(update, meter, feedback, number, num_threads)
        adapter = self._version.adapter
        self._version = PolicyVersion(self._version.lineage, self._version.step + 1, adapter=adapter)
        return {
            "train_s": time.perf_counter() - began,
            "skipped_updates": float(self._optimizer.num_skipped),
            **{f"skipped_{reason}": float(count) for reason, count in sorted(skipped.items())},
            **meter.summary(self._ranks.all_reduce_),
            **feedback.summary(self._ranks.all_reduce_),
        }

    def _make_reference(self) -> LanguageModel:
        """The policy at the start of RL. With adapters the base weights are frozen, and so shared."""
        if self._config.adapter.rank and isinstance(self.model, LanguageModel):
            return copy.copy(self.model)
        return self._ranks.frozen_copy(self.model)

    def whole_model(self) -> LanguageModel:
        """The unsharded model. With several ranks: collective, a copy in host memory on the first one; the
        other ranks' copies have no storage."""
        return self._ranks.whole_model(self.model)

    def offload_states(self) -> None:
        """Clears gradients, and moves the optimiser's states to host memory until the next step."""
        self._optimizer.offload()

    def publish(self) -> WeightManifest:
        if isinstance(self._weights, StoreWeights) and self._weights.is_shared:
            tensors = dict(self._ranks.parts(self.model))
        else:
            tensors = dict(self.whole_model().named_parameters())
        if self.adapters is not None and self._ranks.is_main:
            tensors |= self.adapters.published()
        manifest = self._weights.publish(self._version, tensors)
        self._version = manifest.version
        self._published[self._version.step] = self._version.digest
        return manifest

    def score(
        self, sequences: Sequence[NDArray[np.int32]], routes: Sequence[NDArray[Any]] | None = None
    ) -> list[Scores]:
        with share_threads(split=self._splits_batches):
            scored = score_sequences(self.model, sequences, routes=routes)
        return [Scores(logprobs, self._version) for logprobs in scored]

    def save(
        self,
        directory: Path,
        extra: Mapping[str, Any] | None = None,
        write: WriteCheckpoint = save_checkpoint,
    ) -> None:
        """Writes weights, optimiser and counters, atomically. `extra`: plain values of the caller's to store
        with them; with several ranks, the first one's. `write`: writes the checkpoint, perhaps while training
        continues.

        With adapters, only these are stored, not the base model.
        """
        state: dict[str, Any] = {
            **(extra or {}),
            **self._parts_of_state(),
            "lineage": self._version.lineage,
            "step": self._version.step,
            "published": dict(self._published),
        }
        if self.adapters is not None:
            state["adapters"] = self.adapters.state()
        write(directory, self._stored_model(), state)

    def restore(self, directory: Path) -> None:
        """Loads a checkpoint of `save`. Raises CheckpointError, and changes nothing, if it does not fit."""
        model, state = load_stored(directory, self._stored_model(), self._parts_of_state())
        if state is None or "optimizer" not in state:
            raise CheckpointError("has no optimiser state", field="checkpoint", received=str(directory))
        if (self.adapters is not None) != ("adapters" in state):
            raise CheckpointError(
                "has adapters" if "adapters" in state else "has no adapters",
                field="checkpoint",
                received=str(directory),
                fix="resume with the rl.adapter that the run started with",
            )
        if self.adapters is not None:
            self._optimizer.load_state_dict(state["optimizer"])
            self.adapters.load_state(state["adapters"])
        else:
            if model is None:
                raise CheckpointError("has no model", field="checkpoint", received=str(directory))
            self._optimizer.load_state_dict(state["optimizer"])
            self._ranks.load_weights(self.model, model.state_dict())
        adapter = state["lineage"] if self.adapters is not None else None
        self._version = PolicyVersion(state["lineage"], state["step"], adapter=adapter)
        self._published = dict(state.get("published", {}))
        if self._reference is not None and self.adapters is None and "reference" in state:
            self._ranks.load_weights(self._reference, state["reference"])

    def _stored_model(self) -> AnyModel | ModelShards | None:
        """The model as a checkpoint stores it: nothing of it if adapters are trained."""
        stored = self._ranks.stored(self.model)
        return stored if self.adapters is None else without_model(stored)

    def _parts_of_state(self) -> dict[str, Any]:
        """The large tensors of the state: with several ranks, this rank's shards."""
        state: dict[str, Any] = {"optimizer": self._optimizer.state_dict()}
        if self._reference is not None and self.adapters is None:
            state["reference"] = self._ranks.stored(self._reference).state_dict()
        return state

    def _update(
        self,
        update: Update,
        meter: StepMeter,
        feedback: StepFeedback,
        number: int,
        num_threads: int,
    ) -> None:
        """Computes and applies optimiser update `number` of the step."""
        num_tokens = sum(len(sequence.tokens) for sequence in update)
        shares = self._shares(update)
        own = sorted(index for share in shares if share.weight for index in share.indices)
        assert len(own) == len(set(own)), "no sequence is trained on twice"

        def compute(share: Share) -> tuple[Tensor, None]:
            sequences = [update[index] for index in share.indices]
            batch_share = sum(len(sequence.tokens) for sequence in sequences) / num_tokens
            return self._loss(sequences, share.weight, batch_share, meter), None

        add_gradients(self._trainable, compute, shares, num_threads)
        config = self._config
        feedback.add_gradients(number, self.model, self._ranks, config.micro_batch_tokens, config.temperature)
        norm = self._optimizer.step(lambda: describe_batch(update[index] for index in own), num_threads)
        meter.add_update(norm, num_tokens)

    def _shares(self, update: Update) -> list[Share]:
        """This rank's micro-batches."""
        if not update:
            return []
        lengths = [len(sequence.tokens) for sequence in update]
        shared = shared_tokens(self.model, [sequence.tokens for sequence in update])
        plan = pack_sequences(
            lengths,
            self._config.micro_batch_tokens,
            self._ranks.world_size,
            least_batches=count_batches(len(lengths), sum(lengths), shared) if self._splits_batches else 1,
            shared_tokens=shared,
        )
        return self._ranks.share(plan)

    def _has_gradient(self, sequence: TrainingSequence) -> bool:
        return sequence.has_advantage or (self._config.loss.kl_weight > 0 and sequence.num_trained > 0)

    def _with_old_policy(self, update: Update, num_threads: int) -> Update:
        """A later update's sequences with log-probabilities and routes as before the first update."""
        replays_own = self._config.router_replay == "r2" and ModelLimits.of(self.model).routes is not None
        if not update or not (self._config.loss.needs_proximal or replays_own):
            return update
        known = list(update)
        shares = self._shares(update)

        def score(share: Share) -> list[TrainingSequence]:
            return with_old_policy(self.model, [update[i] for i in share.indices], self._config)

        for share, scored in zip(shares, map_in_order(score, shares, num_threads), strict=True):
            for index, sequence in zip(share.indices, scored, strict=True):
                known[index] = sequence
        return known

    def _loss(
        self, sequences: Sequence[TrainingSequence], weight: float, batch_share: float, meter: StepMeter
    ) -> Tensor:
        """The loss of one micro-batch, which has `batch_share` of the update's tokens; thread-safe.

        With weight 0 it only takes part in the collective operations of the other ranks.
        """
        config = self._config
        batch = PackedSequences.pack([s.tokens for s in sequences], device_of(self.model))
        rows, targets = Rows.of(sequences, batch)
        routes = replayed_routes(sequences, batch, targets, config.replay_min_share)
        statistics = RouterStatistics([], []) if config.loss.balance_weight > 0 else None
        logprobs, entropy = packed_logprobs(
            self.model,
            batch,
            targets,
            temperature=config.temperature,
            routes=routes,
            statistics=statistics,
        )
        if routes is not None:
            routes.check_consumed()
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                # Its router chooses: the recorded routes are the current policy's.
                reference, _ = packed_logprobs(
                    self._reference, batch, targets, temperature=config.temperature
                )
        loss = policy_loss(config, logprobs, rows, reference)
        total = loss.total
        if statistics is not None:
            total = total + config.loss.balance_weight * batch_share * statistics.balance_loss()
        if weight:
            meter.add(rows, logprobs, entropy, loss)
        return total * weight
