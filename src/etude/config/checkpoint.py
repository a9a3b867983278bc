"""Checkpoints and weight snapshots of a run."""

from __future__ import annotations

from pydantic import Field

from etude.config.base import Section


class CheckpointConfig(Section):
    """Checkpoints that a run keeps."""

    every_s: float = Field(default=20.0, gt=0)
    """Seconds between resumable checkpoints."""
    asynchronous: bool = True
    """Whether checkpoints are written while training continues. Training then waits only until everything is
    copied to host memory, which needs memory for a second copy of weights and optimiser. `false`: training
    waits until everything is on disk."""
    keep_last: int = Field(default=2, ge=1)
    """Number of resumable checkpoints that are kept. If the newest one is damaged, the one before it is
    used."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Also keeps the resumable checkpoints whose step is a multiple of this; 0 keeps none."""
    keep_best: int = Field(default=0, ge=0)
    """Also keeps this many checkpoints with the best scores. In reinforcement learning the score is the mean
    reward of the step."""
    curve_every_steps: int = Field(default=10, ge=0)
    """RL steps between weight snapshots kept for the learning curve; 0: none."""
