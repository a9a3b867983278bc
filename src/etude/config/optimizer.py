"""The optimisers of all training stages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.config.base import Section


class OptimizerConfig(Section):
    """The optimiser: AdamW, or Muon for the weight matrices and AdamW for the rest, with one schedule."""

    matrix_optimizer: Literal["adamw", "muon"] = "adamw"
    """Algorithm that updates the weight matrices of the blocks."""
    matrix_learning_rate: float = Field(default=0.02, gt=0, le=1)
    """Peak learning rate of Muon; unused with AdamW."""
    learning_rate: float = Field(default=5e-4, ge=0, le=1)
    """Peak learning rate of AdamW; 0 trains nothing, which serves as a control."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay on AdamW's matrices; Muon has none."""
    clip_norm: float = Field(default=0.5, gt=0)
    """Largest global norm of the gradients; larger ones are scaled down to it."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of moments and momentum; `bfloat16`, rounded stochastically, takes half the memory."""
    schedule: Literal["wsd", "constant", "linear", "cosine"] = "wsd"
    """Learning rate after the warm-up. `wsd`: constant, then a linear decay over the last `decay_share` of
    the steps. `linear`, `cosine`: decay to `final_share` until the end. `constant`: no decay."""
    warmup_steps: int = Field(default=4, ge=0)
    """Optimiser steps of linear warm-up."""
    decay_share: float = Field(default=0.3, ge=0, le=1)
    """`wsd`: share of the steps, at the end, over which the rate falls linearly to `final_share`."""
    final_share: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    keep_offending: int = Field(default=4, ge=0)
    """Number of batches with a non-finite gradient that are kept in the run's directory, the newest first.
    Their steps are skipped and counted."""


class MidtrainOptimizerConfig(OptimizerConfig):
    """The optimiser's defaults for mid-training: larger steps, Muon for the matrices."""

    matrix_optimizer: Literal["adamw", "muon"] = "muon"
    learning_rate: float = Field(default=3e-3, ge=0, le=1)
    clip_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    decay_share: float = Field(default=0.5, ge=0, le=1)
