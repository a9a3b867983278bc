"""Interface between a model architecture and its two users, the trainer and the engine."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

TensorT = TypeVar("TensorT")


class Attention(Protocol, Generic[TensorT]):
    """Attention over a packed batch (training) or a KV cache (inference).

    T tokens of many sequences follow each other without padding.
    """

    def attend(self, layer: int, query: TensorT, key: TensorT, value: TensorT) -> TensorT:
        """query [T, heads, dim], key and value [T, kv_heads, dim], rotary embedding applied.

        Returns [T, heads, dim]. A cache stores key and value before it attends.
        """
        ...


class Routes(Protocol, Generic[TensorT]):
    """Chooses which experts process which token, or replays a recorded choice."""

    def select(self, layer: int, scores: TensorT) -> TensorT:
        """scores [T, experts] -> chosen experts [T, top_k] (int64), in order of falling score.

        A recording implementation keeps what it returns; a replaying one returns what was recorded
        and lets the router choose where the record says -1.
        """
        ...


class Model(Protocol, Generic[TensorT]):
    """A language model: one definition, used by the trainer and the engine alike."""

    def forward(
        self,
        tokens: TensorT,
        positions: TensorT,
        attention: Attention[TensorT],
        routes: Routes[TensorT] | None = None,
    ) -> TensorT:
        """tokens [T], positions [T] -> final hidden states [T, width], before the output head."""
        ...

    def logits(self, hidden: TensorT) -> TensorT:
        """hidden [N, width] -> logits [N, vocabulary] in float32."""
        ...
