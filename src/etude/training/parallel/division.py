"""Checks whether a model can be divided as configured, before any process is started."""

from __future__ import annotations

from etude.config import ModelConfig
from etude.config.parallel import ParallelConfig
from etude.errors import ConfigError

_MULTIPLE = 4
"""Inner widths and their parts must be multiples of this: grouped matrix products require it."""


def check_division(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError if a model's experts, heads or inner widths cannot be divided as configured."""
    _check_experts(model, parallel.expert)
    if parallel.tensor > 1:
        _check_tensor(model, parallel.tensor)


def _check_experts(model: ModelConfig, parts: int) -> None:
    count = model.num_experts if model.num_moe_layers else 0
    if parts > 1 and (not count or count % parts):
        raise ConfigError(
            f"must divide the number of experts, which is {count}",
            field="parallel.expert",
            received=parts,
            fix="choose a divisor, or 1 for a model without experts",
        )


def _check_tensor(model: ModelConfig, parts: int) -> None:
    heads, kv_heads = model.num_heads, model.num_heads if model.is_latent else model.num_kv_heads
    if heads % parts or kv_heads % parts:
        raise ConfigError(
            f"must divide the numbers of heads, {heads}, and of key heads, {kv_heads}",
            field="parallel.tensor",
            received=parts,
            fix="choose a divisor of both; parallel.fsdp divides weights into any number of parts",
        )
    for name, width in _inner_widths(model).items():
        if width % (parts * _MULTIPLE):
            raise ConfigError(
                f"must divide {name} = {width} into multiples of {_MULTIPLE}",
                field="parallel.tensor",
                received=parts,
                fix="choose a smaller one; parallel.fsdp divides weights into any number of parts",
            )


def _inner_widths(model: ModelConfig) -> dict[str, int]:
    """The inner widths of the architecture, by the configuration's names."""
    widths: dict[str, int] = {}
    if model.num_moe_layers < model.num_layers:
        widths["model.intermediate_size"] = model.intermediate_size
    if model.num_moe_layers:
        widths["model.expert_size"] = model.expert_size
    return widths
