"""Low-rank adapters: training a small part of a model."""

from __future__ import annotations

from pydantic import Field

from etude.config.base import Section


class AdapterConfig(Section):
    """Low-rank adaptation (LoRA): the weights stay, a product of two thin matrices is trained for each."""

    rank: int = Field(default=0, ge=0)
    """Inner width of the two matrices; 0: no adapters, all weights are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """The product is multiplied by alpha / rank before it is added to the weight."""
    targets: tuple[str, ...] = Field(default=("attention", "feed_forward"), min_length=1)
    """Which weights. `attention`, `feed_forward` (dense and expert matrices, never routers), or the names of
    single ones, such as `qkv`, `q_proj` or `down`."""
    seed: int = Field(default=0, ge=0)
    """Seed of the matrices that do not begin at zero."""
