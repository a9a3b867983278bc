"""What can be told of a division before any process is started."""

from __future__ import annotations

from etude.config import ModelConfig
from etude.errors import ConfigError


def check_expert_parts(model: ModelConfig, parts: int) -> None:
    """Raises ConfigError if a model's experts cannot be divided into so many equal parts."""
    count = model.num_experts if model.num_moe_layers else 0
    if parts > 1 and (not count or count % parts):
        raise ConfigError(
            f"must divide the number of experts, which is {count}",
            field="parallel.expert",
            received=parts,
            fix="choose a divisor, or 1 for a model without experts",
        )
