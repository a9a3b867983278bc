"""The language model, generic in its blocks: one definition for the trainer and the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from etude.config import ModelConfig
from etude.model.blocks import Block, make_block
from etude.model.feed_forward import Pass, RouterStatistics
from etude.model.ops import Ops, TorchOps
from etude.model.rotary import rotary_tables
from etude.model.routes import NativeRoutes, RecordedRoutes
from etude.protocols import Attention, Routes


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm and output head.

    All arithmetic uses `ops`, which may be replaced between forward passes.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.ops: Ops = TorchOps()
        self.adapt: Callable[[Ops], Ops] | None = None
        """Adds low-rank adapters to `ops`, for each forward pass; None without adapters."""
        self.embedding = nn.Parameter(torch.empty(vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(make_block(config, layer) for layer in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.output_embedding: nn.Parameter | None = None
        if not config.tie_embeddings:
            self.output_embedding = nn.Parameter(torch.empty(vocab_size, config.hidden_size))
        for name, table in zip(("cosine", "signed_sine"), rotary_tables(config), strict=True):
            self.register_buffer(name, table, persistent=False)
        self.native_routes = NativeRoutes(config.experts_per_token)
        self.unread: Path | None = None
        """Directory from which the weights have yet to be read; the model is then on the device `meta`."""

    @property
    def head(self) -> nn.Parameter:
        """[vocabulary, width]: the embedding itself if the two are tied."""
        return self.embedding if self.output_embedding is None else self.output_embedding

    @property
    def max_positions(self) -> int:
        """Longest sequence in tokens."""
        return self.config.max_positions

    @property
    def routes_shape(self) -> tuple[int, int]:
        """Layers that route, and experts per token; (0, 0) for a dense model."""
        return self.config.num_moe_layers, self.config.routes_per_token

    @property
    def num_experts(self) -> int:
        """Experts of a layer that routes; 0 for a dense model."""
        return self.config.num_experts if self.config.num_moe_layers else 0

    def recorder(self) -> RecordedRoutes:
        """Records the experts of one forward pass."""
        return RecordedRoutes.of(self.config)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention[Tensor],
        routes: Routes[Tensor] | None = None,
        statistics: RouterStatistics | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """tokens [T], positions [T] -> final hidden states [T, width], after the last norm.

        `wanted` [N]: only these rows are returned, [N, width], and all operations after the last attention
        are computed for them alone: `routes` and `statistics` then have N rows in the last layer.
        """
        ops = self.ops if self.adapt is None else self.adapt(self.ops)
        hidden = ops.embed(tokens, self.embedding)
        chosen_by = routes if routes is not None else self.native_routes
        shared = Pass(ops, self.rotation(positions), attention, chosen_by, statistics)
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, shared, wanted if layer == last else None)
        return ops.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each of `positions` [T]: [T, 1, rope_dim] each."""
        return cast(Tensor, self.cosine)[positions], cast(Tensor, self.signed_sine)[positions]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, width] -> logits [N, vocabulary] in float32."""
        return self.ops.logits(hidden, self.head)

    def logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """hidden [N, width], tokens [N] -> float32 log-probability of each and entropy (detached) [N]."""
        return self.ops.logprobs(hidden, self.head, tokens, temperature)

    def reset_rotation(self) -> None:
        """Recomputes the rotary tables from `config`, in their type and on their device."""
        for name, table in zip(("cosine", "signed_sine"), rotary_tables(self.config), strict=True):
            setattr(self, name, table.to(self.get_buffer(name)))

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Sets whether blocks keep only their input for the backward pass and recompute the rest: about a
        third more work, a fraction of the memory, the same gradients."""
        for block in self.blocks:
            cast(Block, block).recompute = enabled

    def cast(self, dtype: torch.dtype) -> LanguageModel:
        """Changes the type of the weights in place and returns the model; router biases stay float32."""
        self.to(dtype)
        for name, parameter in self.named_parameters():
            if name.endswith(".score_bias"):
                parameter.data = parameter.data.float()
        return self

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws the weights: normal matrices, unit norms, output projections scaled by depth, no biases."""
        generator = torch.Generator().manual_seed(seed)
        std = self.config.initializer_range
        residual = std / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("_bias") else 1.0)
            else:
                scale = residual if name.endswith((".out", ".down")) else std
                parameter.normal_(0.0, scale, generator=generator)


def build_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """A model of the configured architecture; its weights are not set yet."""
    return LanguageModel(config, vocab_size)


def block_of(model: LanguageModel, layer: int) -> Block:
    """One block, typed."""
    return cast(Block, model.blocks[layer])
