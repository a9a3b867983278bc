"""How tensor parallelism divides each weight (Megatron-LM, Shoeybi et al. 2019).

    qkv, gate and up      columns of the product: heads, and inner units     ──┐ no communication between
    out, down             rows of the product, which is summed over ranks    <─┘
    embedding, head       tokens of the vocabulary
    norms, routers, weights shared by all heads     replicated

A fused projection, which concatenates several, is cut within each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cut:
    """How one weight is divided."""

    dim: int
    sections: tuple[int, ...]
    """Sizes along `dim` of the sections that are cut separately; their sum is the whole size."""

    @property
    def is_run(self) -> bool:
        """Whether each part is a contiguous run of the whole's rows."""
        return self.dim == 0 and len(self.sections) == 1

    def part(self, whole: Tensor, count: int, index: int) -> Tensor:
        """Part `index` of `count`; of a section that does not divide evenly, the last parts are smaller."""
        own = [run_of(section, count, index, self.dim) for section in whole.split(self.sections, self.dim)]
        return own[0] if len(own) == 1 else torch.cat(own, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """All parts, in order -> the whole."""
        total = sum(self.sections)
        cut = [
            part.split([size * part.shape[self.dim] // total for size in self.sections], self.dim)
            if len(self.sections) > 1
            else (part,)
            for part in parts
        ]
        return torch.cat([piece for section in zip(*cut, strict=True) for piece in section], self.dim)


def run_of(whole: Tensor, count: int, index: int, dim: int = 0) -> Tensor:
    """Part `index` of `count` as `torch.chunk` cuts; may be empty."""
    start, stop = run_bounds(whole.shape[dim], count, index)
    return whole.narrow(dim, start, stop - start)


def run_bounds(size: int, count: int, index: int) -> tuple[int, int]:
    """Start and end of part `index` of `count`."""
    step = -(-size // count)
    return min(index * step, size), min((index + 1) * step, size)


def cuts_of(config: ModelConfig, vocab_size: int) -> Mapping[str, Cut]:
    """The cut of each weight that is divided, by its name within a block, or in the model."""
    inner, expert, shared = (
        config.intermediate_size,
        config.expert_size,
        config.n_shared_experts * config.expert_size,
    )
    cuts = {
        "embedding": Cut(0, (vocab_size,)),
        "output_embedding": Cut(0, (vocab_size,)),
        "mlp.gate_up": Cut(0, (inner, inner)),
        "mlp.down": Cut(1, (inner,)),
        "experts.gate_up": Cut(2, (expert, expert)),
        "experts.down": Cut(1, (expert,)),
        "experts.shared.gate_up": Cut(0, (shared, shared)),
        "experts.shared.down": Cut(1, (shared,)),
    }
    heads = config.num_heads
    if config.is_latent:
        rows = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        return cuts | {
            "query_up": Cut(0, (rows,)),
            "key_up": Cut(0, (heads,)),
            "value_up": Cut(0, (heads,)),
            "out": Cut(1, (heads * config.v_head_dim,)),
        }
    query, key = heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = Cut(0, (query, key, key))
    return cuts | {"qkv": rows, "qkv_bias": rows, "out": Cut(1, (query,))}


def name_within(name: str) -> str:
    """`blocks.3.mlp.down` -> `mlp.down`; names outside of blocks are unchanged."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def is_seen_in_parts(name: str, config: ModelConfig) -> bool:
    """Whether each rank uses a replicated weight for its own heads only: its gradient is then the sum over
    tensor ranks. The gradient of any other replicated weight is the same on all of them."""
    return not config.is_latent and name_within(name) in ("query_norm", "key_norm")
