"""The model and its tokenizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section

Architecture = Literal["qwen3_moe", "qwen3", "qwen2", "llama", "deepseek_v3"]


class TokenizerConfig(Section):
    """The tokenizer that is trained for a model which starts from random weights."""

    vocab_size: int = Field(default=1024, ge=320, le=1_000_000)
    """Number of tokens: 256 bytes, the grammar's tags, and merges."""


class ModelConfig(Section):
    """The architecture of a model that starts from random weights, in the terms of Hugging Face."""

    architecture: Architecture = "qwen3_moe"
    """`qwen3_moe`: mixture of experts. `qwen3`: dense, with normalised queries and keys. `qwen2`: dense, with
    biases on queries, keys and values instead. `llama`: dense, with neither; also Mistral and SmolLM2.
    `deepseek_v3`: latent attention and sigmoid routing, also used by Kimi-K2."""
    hidden_size: int = Field(default=128, ge=8, multiple_of=4)
    """Width of the residual stream; a multiple of 4, as grouped matrix products require."""
    num_layers: int = Field(default=3, ge=1)
    """Number of transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Number of key and value heads; divides `num_heads`. `deepseek_v3` caches one and ignores it."""
    head_dim: int = Field(default=32, ge=2)
    """Width of one head; even, for rotary embeddings. `deepseek_v3` uses `qk_nope_head_dim`,
    `qk_rope_head_dim` and `v_head_dim` instead."""
    intermediate_size: int = Field(default=384, ge=4, multiple_of=4)
    """Inner width of a dense layer: of all layers in `qwen3`, `qwen2` and `llama`, of the first ones in
    `deepseek_v3`."""
    num_experts: int = Field(default=8, ge=1, le=65_534)
    """Experts per block; a recorded route is one byte for up to 255 experts, and two for more."""
    experts_per_token: int = Field(default=2, ge=1)
    """Number of experts that compute each token."""
    expert_size: int = Field(default=96, ge=4, multiple_of=4)
    """Inner width of one expert; a multiple of 4."""
    norm_topk_prob: bool = True
    """Whether the gates of a token's experts are scaled to sum to 1."""
    tie_embeddings: bool = True
    """Whether the output head shares its weights with the embedding."""
    max_positions: int = Field(default=768, ge=16)
    """Longest sequence in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Constant added to the mean square before its root is taken."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    q_lora_rank: int = Field(default=0, ge=0)
    """`deepseek_v3`: width through which queries are projected; 0: directly."""
    kv_lora_rank: int = Field(default=64, ge=1)
    """`deepseek_v3`: width of the compressed keys and values, which is what is cached."""
    qk_nope_head_dim: int = Field(default=32, ge=1)
    """`deepseek_v3`: part of a head's query and key without position."""
    qk_rope_head_dim: int = Field(default=16, ge=2, multiple_of=2)
    """`deepseek_v3`: rotary part of a head's query, and of the key that all heads share."""
    v_head_dim: int = Field(default=32, ge=1)
    """`deepseek_v3`: width of one head's value."""
    n_shared_experts: int = Field(default=1, ge=0)
    """`deepseek_v3`: experts that process every token, in addition to the routed ones."""
    n_group: int = Field(default=1, ge=1)
    """`deepseek_v3`: groups of experts; divides `num_experts`."""
    topk_group: int = Field(default=1, ge=1)
    """`deepseek_v3`: groups from which one token's experts are chosen."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """`deepseek_v3`: factor on the gates of the routed experts."""
    first_k_dense_replace: int = Field(default=1, ge=0)
    """`deepseek_v3`: number of dense layers at the start."""
    rope_interleave: bool = True
    """`deepseek_v3`: whether a Hugging Face checkpoint holds rotary rows in pairs, not halves."""
    rope_scaling: Literal["yarn", "llama3", "linear"] = "yarn"
    """How positions are scaled if `rope_factor` is above 1: `yarn`, and `llama3` (Llama 3.1 to 3.3) with
    another ramp, leave dimensions with many turns unchanged; `linear` scales all."""
    rope_factor: float = Field(default=1.0, ge=1)
    """Factor by which positions are scaled; 1: not at all, and the fields below are ignored."""
    rope_original_positions: int = Field(default=4096, ge=1)
    """Longest sequence before the scaling."""
    rope_fast_turns: float = Field(default=32.0, gt=0)
    """Dimensions with more turns than this within the original length keep their frequency."""
    rope_slow_turns: float = Field(default=1.0, gt=0)
    """Dimensions with fewer turns than this within the original length are scaled fully."""
    yarn_mscale: float = Field(default=0.0, ge=0)
    """With `yarn_mscale_all_dim`, weight of the factor's logarithm on rotary parts; 0: not given."""
    yarn_mscale_all_dim: float = Field(default=0.0, ge=0)
    """Weight of the factor's logarithm on all attention scores (`deepseek_v3`); 0: none."""
    yarn_attention_factor: float = Field(default=0.0, ge=0)
    """Factor on the rotary tables; 0: derived from `rope_factor` and the two before."""
    yarn_truncate: bool = True
    """Whether the bounds between unchanged and scaled dimensions are whole numbers."""

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are compressed into one vector per token (MLA)."""
        return self.architecture == "deepseek_v3"

    @property
    def has_query_norm(self) -> bool:
        """Whether queries and keys of grouped-query attention are normalised."""
        return self.architecture in ("qwen3", "qwen3_moe")

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections of queries, keys and values have biases."""
        return self.architecture == "qwen2"

    @property
    def num_moe_layers(self) -> int:
        """Number of layers that route: the second dimension of recorded routes."""
        dense = {"qwen3_moe": 0, "deepseek_v3": self.first_k_dense_replace}
        return self.num_layers - dense.get(self.architecture, self.num_layers)

    @property
    def routes_per_token(self) -> int:
        """The third dimension of recorded routes: 0 if no layer routes."""
        return self.experts_per_token if self.num_moe_layers else 0

    @property
    def route_dtype(self) -> Literal["uint8", "uint16"]:
        """Type of a recorded route. Its largest value marks a route that was not recorded."""
        return "uint8" if self.num_experts <= 255 or not self.num_moe_layers else "uint16"

    @property
    def cache_heads(self) -> int:
        """Key heads as cached."""
        return 1 if self.is_latent else self.num_kv_heads

    @property
    def key_dim(self) -> int:
        """Width of one cached key, and of one query in attention."""
        return self.kv_lora_rank + self.qk_rope_head_dim if self.is_latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one cached value, and of one head of attention's output."""
        return self.kv_lora_rank if self.is_latent else self.head_dim

    @property
    def value_is_key_prefix(self) -> bool:
        """Whether a value is the first `value_dim` entries of its key, and needs no cache of its own."""
        return self.is_latent

    @property
    def rope_dim(self) -> int:
        """Width of the rotary part of a head."""
        return self.qk_rope_head_dim if self.is_latent else self.head_dim

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        if not self.is_latent and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: must divide num_heads={self.num_heads}, received {self.num_kv_heads}"
            )
        if not self.is_latent and self.head_dim % 2:
            raise ValueError(f"head_dim: must be even, received {self.head_dim}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token: must be at most num_experts={self.num_experts}, "
                f"received {self.experts_per_token}"
            )
        if self.rope_scaling == "llama3" and self.rope_fast_turns <= self.rope_slow_turns:
            raise ValueError(
                f"rope_fast_turns: must be above rope_slow_turns={self.rope_slow_turns}, "
                f"received {self.rope_fast_turns}"
            )
        if self.is_latent:
            self._check_groups()
        return self

    def _check_groups(self) -> None:
        if self.first_k_dense_replace > self.num_layers:
            raise ValueError(
                f"first_k_dense_replace: must be at most num_layers={self.num_layers}, "
                f"received {self.first_k_dense_replace}"
            )
        if self.num_experts % self.n_group or (self.n_group > 1 and self.num_experts < 2 * self.n_group):
            raise ValueError(
                f"n_group: must cut num_experts={self.num_experts} into equal groups of two or more, "
                f"received {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group: must be at most n_group={self.n_group}, received {self.topk_group}"
            )
        reachable = self.topk_group * (self.num_experts // self.n_group)
        if self.experts_per_token > reachable:
            raise ValueError(
                f"experts_per_token: must be at most the {reachable} experts of topk_group={self.topk_group} "
                f"groups, received {self.experts_per_token}"
            )
