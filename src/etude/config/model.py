"""The model and its tokenizer."""

from __future__ import annotations

from pydantic import Field, model_validator

from etude.config.base import Section


class TokenizerConfig(Section):
    """The tokenizer trained for a model that starts from nothing."""

    vocab_size: int = Field(default=1024, ge=320, le=1_000_000)
    """Number of tokens: 256 bytes, the grammar's tags, and merges."""


class ModelConfig(Section):
    """A Qwen3 mixture of experts, in Hugging Face's terms."""

    hidden_size: int = Field(default=128, ge=8, multiple_of=4)
    """Width of the residual stream; a multiple of 4, as grouped matrix products want it."""
    num_layers: int = Field(default=3, ge=1)
    """Number of transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Number of key and value heads; divides `num_heads`."""
    head_dim: int = Field(default=32, ge=2)
    """Width of one head; even, for rotary embeddings."""
    num_experts: int = Field(default=8, ge=1, le=255)
    """Experts per block; a recorded route is one byte, and 255 says that nothing was recorded."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that see each token."""
    expert_size: int = Field(default=96, ge=4, multiple_of=4)
    """Inner width of one expert; a multiple of 4."""
    max_positions: int = Field(default=768, ge=16)
    """Longest sequence in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square before its root is taken."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: must divide num_heads={self.num_heads}, received {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: must be even, received {self.head_dim}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token: must be at most num_experts={self.num_experts}, "
                f"received {self.experts_per_token}"
            )
        return self
