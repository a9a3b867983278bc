"""Groups as a rollout would hand them over, sampled from nothing but a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from etude.config import LossConfig, MidtrainConfig, OptimizerConfig, RlConfig
from etude.config.optimizer import MidtrainOptimizerConfig
from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from etude.records import (
    Group,
    PolicyVersion,
    RewardBreakdown,
    SamplingParams,
    Segment,
    Status,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from etude.store.blobs import MemoryBlobs
from etude.training import Document, NextTokenTrainer, RlTrainer, ShuffledDocuments
from etude.weights import MemoryWeights
from tests.model.builders import fresh_routes, random_tokens, small_model

PROMPT = 5
"""Tokens of each prompt, never trained on."""


class Rollouts:
    """Makes segments that `model` might have sampled, with exact log-probabilities and routes."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.blobs = MemoryBlobs()
        self._count = 0

    def segment(self, length: int, **changes: Any) -> Segment:
        """PROMPT tokens, sampled ones, an observation of 2 tokens in the middle, sampled ones."""
        self._count += 1
        tokens = random_tokens(length, self._count)
        sampled = np.arange(length) >= PROMPT
        sampled[length // 2 : length // 2 + 2] = False
        logprobs = np.where(sampled, score_sequences(self.model, [tokens])[0], 0.0).astype(np.float32)
        version = PolicyVersion("run", 0)
        fields: dict[str, Any] = {
            "id": f"segment{self._count}",
            "trajectory_id": f"trajectory{self._count}",
            "tokens": tokens,
            "sampled": sampled,
            "logprobs": logprobs,
            "version_spans": (VersionSpan(0, length, version),),
            "kv_oldest_spans": (VersionSpan(0, length, version),),
            "turn_spans": (),
            "sampling": SamplingParams(),
            "tokenizer_digest": "t",
            "template_digest": "t",
            "routes": self.blobs.put(fresh_routes(self.model, tokens)),
        }
        return Segment(**(fields | changes))

    def member(
        self,
        reward: RewardBreakdown | float | None,
        length: int = 20,
        status: Status = Status.DONE,
        **changes: Any,
    ) -> Trajectory:
        if isinstance(reward, (int, float)):
            reward = RewardBreakdown(reward)
        segment = self.segment(length, **changes)
        identity = TrajectoryId("run", "task", 0, 0, self._count)
        return Trajectory(identity, (segment,), (), status, reward=reward)

    def group(self, rewards: Sequence[float], lengths: Sequence[int] | None = None) -> Group:
        lengths = lengths or [12 + 5 * i for i in range(len(rewards))]
        members = [self.member(reward, length) for reward, length in zip(rewards, lengths, strict=True)]
        return as_group(members)


def as_group(members: Sequence[Trajectory]) -> Group:
    return Group("g", "task", len(members), tuple(members))


def rl_config(
    loss: Mapping[str, Any] | None = None, optimizer: Mapping[str, Any] | None = None, **changes: Any
) -> RlConfig:
    """CISPO over tokens, one update per step at a rate that moves a small model visibly."""
    plain: dict[str, Any] = {"kind": "cispo", "normalizer": "tokens"}
    defaults: dict[str, Any] = {"learning_rate": 1e-2, "warmup_steps": 0, "decay_share": 0.0}
    values: dict[str, Any] = {
        "num_steps": 10,
        "updates_per_step": 1,
        "loss": LossConfig(**(plain | dict(loss or {}))),
        "optimizer": OptimizerConfig(**(defaults | dict(optimizer or {}))),
    }
    return RlConfig(**(values | changes))


def trainer_of(config: RlConfig, rollouts: Rollouts, seed: int = 0, **options: Any) -> RlTrainer:
    """A trainer of `small_model(seed)` that reads the rollouts' routes."""
    return RlTrainer(small_model(seed), config, "run", MemoryWeights(), rollouts.blobs.get, **options)


def midtrain_documents(count: int = 8) -> list[Document]:
    """Documents of 10 to 29 tokens: prompts of weight 0.3, then agents of weight 1."""
    documents = []
    for seed in range(count):
        tokens = random_tokens(10 + 7 * seed % 20, seed)
        agent = np.arange(len(tokens)) >= 4
        documents.append(Document(tokens, np.where(agent, 1.0, 0.3).astype(np.float32), agent))
    return documents


def midtrain_config(**changes: Any) -> MidtrainConfig:
    optimizer = MidtrainOptimizerConfig(warmup_steps=2, matrix_learning_rate=0.02)
    values: dict[str, Any] = {"num_steps": 12, "tokens_per_step": 64, "optimizer": optimizer}
    return MidtrainConfig(**(values | changes))


def next_token_trainer(
    model: LanguageModel, documents: Sequence[Document], config: MidtrainConfig, seed: int
) -> NextTokenTrainer:
    """A trainer on shuffled documents."""
    return NextTokenTrainer(model, ShuffledDocuments(documents, config.tokens_per_step, seed), config)
