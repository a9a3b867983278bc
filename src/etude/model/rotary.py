"""Tables of the rotary embedding, stretched by YaRN where the configuration says so."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from etude.config import ModelConfig


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine, [positions, 1, rope_dim] float32 each, in the half-split layout."""
    positions = torch.arange(config.max_positions, dtype=torch.float64)
    angles = torch.outer(positions, _frequencies(config))
    factor = _table_factor(config)
    sine, cosine = angles.sin() * factor, angles.cos() * factor
    return (
        torch.cat((cosine, cosine), dim=-1).float()[:, None],
        torch.cat((-sine, sine), dim=-1).float()[:, None],
    )


def attention_scale(config: ModelConfig) -> float:
    """What scores are multiplied by before the softmax.

    1 / sqrt of a head's width; in latent attention that of the head before compression, and YaRN's factor
    on top (squared, since it belongs to the query and to the key).
    """
    if not config.is_latent:
        return config.head_dim**-0.5
    factor = _log_scale(config.yarn_factor, config.yarn_mscale_all_dim)
    return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * factor * factor


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions, [rope_dim / 2] float64.

    YaRN (Peng et al. 2023) keeps those that turn often within the original length, divides those that turn
    less than once by the factor, and goes from one to the other linearly in between.
    """
    dim, base = config.rope_dim, config.rope_theta
    frequencies = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if config.yarn_factor == 1.0:
        return frequencies

    def dimension_of(turns: float) -> float:
        """The pair that turns so often within the original length."""
        return dim * math.log(config.yarn_original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(config.yarn_beta_fast), dimension_of(config.yarn_beta_slow)
    if config.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / config.yarn_factor * stretched


def _table_factor(config: ModelConfig) -> float:
    """YaRN's factor on the rotary tables."""
    factor, all_dim = config.yarn_factor, config.yarn_mscale_all_dim
    if factor == 1.0:
        return 1.0
    if config.yarn_attention_factor:
        return config.yarn_attention_factor
    if config.yarn_mscale and all_dim:
        return _log_scale(factor, config.yarn_mscale) / _log_scale(factor, all_dim)
    return _log_scale(factor, 1.0)


def _log_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
