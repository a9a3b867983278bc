"""Next-token training on weighted documents, before any reinforcement learning."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etude.config import MidtrainConfig
from etude.model import Qwen3Moe, RouterStatistics
from etude.model.scoring import PackedSequences, device_of, packed_logprobs
from etude.training.optimizer import Optimizer


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens with a loss weight each; 0 masks a token out."""

    tokens: NDArray[np.int32]
    """[T]"""
    weights: NDArray[np.float32]
    """[T] entry 0 is never used: nothing comes before the first token."""
    agent: NDArray[np.bool_]
    """[T] True where the agent wrote the token: the loss on these is reported by itself."""


class MidtrainTrainer:
    """Trains a model on documents drawn without replacement, epoch by epoch."""

    def __init__(
        self, model: Qwen3Moe, documents: Sequence[Document], config: MidtrainConfig, seed: int
    ) -> None:
        self.model = model
        self._documents = documents
        self._config = config
        self._optimizer = Optimizer(model, config.optimizer, config.num_steps)
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._shuffle()

    @property
    def num_steps_taken(self) -> int:
        return self._optimizer.num_taken

    def step(self) -> Mapping[str, float]:
        """One optimiser step; returns metrics (losses in nats per token)."""
        began = time.perf_counter()
        documents = self._draw()
        batch = PackedSequences.pack([document.tokens for document in documents], device_of(self.model))
        weights = batch.pack_rows([document.weights for document in documents])
        agent = batch.pack_rows([document.agent for document in documents])
        weights[batch.starts] = 0.0
        targets = (weights > 0).nonzero().flatten()
        chosen = weights[targets]
        statistics = RouterStatistics([], [])
        logprobs, _ = packed_logprobs(self.model, batch, targets, statistics=statistics)
        loss = -(logprobs * chosen).sum() / chosen.sum()
        balance = statistics.balance_loss()
        (loss + self._config.balance_weight * balance).backward()
        norm = self._optimizer.step()
        agent_rows = agent[targets]
        agent_loss = -float(logprobs.detach()[agent_rows].mean()) if bool(agent_rows.any()) else 0.0
        return {
            "loss": float(loss.detach()),
            "agent_loss": agent_loss,
            "balance": float(balance.detach()),
            "grad_norm": norm,
            "tokens": float(len(batch.tokens)),
            "step_s": time.perf_counter() - began,
        }

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on exactly; the weights are not part of it."""
        return {"optimizer": self._optimizer.state_dict(), "epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._shuffle()

    def _draw(self) -> list[Document]:
        """The next documents of the epoch, up to the step's tokens."""
        chosen: list[Document] = []
        num_tokens = 0
        while num_tokens < self._config.tokens_per_step:
            if self._cursor == len(self._order):
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = self._shuffle()
            document = self._documents[self._order[self._cursor]]
            self._cursor += 1
            chosen.append(document)
            num_tokens += len(document.tokens)
        return chosen

    def _shuffle(self) -> NDArray[np.int64]:
        return np.random.default_rng((self._seed, self._epoch)).permutation(len(self._documents))


def evaluate_loss(model: Qwen3Moe, documents: Sequence[Document]) -> float:
    """Mean loss in nats per agent token."""
    batch = PackedSequences.pack([document.tokens for document in documents], device_of(model))
    agent = batch.pack_rows([document.agent for document in documents])
    agent[batch.starts] = False
    with torch.no_grad():
        logprobs, _ = packed_logprobs(model, batch, agent.nonzero().flatten())
    return -float(logprobs.mean())
