"""Tables of the rotary embedding, with the configured scaling of positions."""

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
    """Factor on attention scores before the softmax.

    1 / sqrt of a head's width; in latent attention of the head before compression, times YaRN's factor
    squared (once for the query, once for the key).
    """
    if not config.is_latent:
        return config.head_dim**-0.5
    factor = _log_scale(config.rope_factor, config.yarn_mscale_all_dim)
    return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * factor * factor


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions, [rope_dim / 2] float64.

    YaRN (Peng et al. 2023) and Llama 3 keep those with many turns within the original length, divide those
    with few turns by the factor, and interpolate in between: linearly in the dimension, or in the number of
    turns.
    """
    dim, base = config.rope_dim, config.rope_theta
    frequencies = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if config.rope_factor == 1.0:
        return frequencies
    if config.rope_scaling == "yarn":
        stretched = _yarn_ramp(config)
    elif config.rope_scaling == "llama3":
        turns = config.rope_original_positions * frequencies / (2 * math.pi)
        fast, slow = config.rope_fast_turns, config.rope_slow_turns
        stretched = ((fast - turns) / (fast - slow)).clamp(0, 1)
    else:
        stretched = torch.ones_like(frequencies)
    return frequencies * (1 - stretched) + frequencies / config.rope_factor * stretched


def _yarn_ramp(config: ModelConfig) -> Tensor:
    """Weight, from 0 to 1, of the scaled frequency of each pair, [rope_dim / 2] float64."""
    dim, base = config.rope_dim, config.rope_theta

    def dimension_of(turns: float) -> float:
        """The pair with this number of turns within the original length."""
        return dim * math.log(config.rope_original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(config.rope_fast_turns), dimension_of(config.rope_slow_turns)
    if config.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    return ramp.clamp(0, 1)


def _table_factor(config: ModelConfig) -> float:
    """YaRN's factor on the rotary tables."""
    factor, all_dim = config.rope_factor, config.yarn_mscale_all_dim
    if factor == 1.0 or config.rope_scaling != "yarn":
        return 1.0
    if config.yarn_attention_factor:
        return config.yarn_attention_factor
    if config.yarn_mscale and all_dim:
        return _log_scale(factor, config.yarn_mscale) / _log_scale(factor, all_dim)
    return _log_scale(factor, 1.0)


def _log_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
