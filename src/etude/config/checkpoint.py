"""What a run keeps on disk of the model on its way."""

from __future__ import annotations

from pydantic import Field

from etude.config.base import Section


class CheckpointConfig(Section):
    """What is kept on the way."""

    every_s: float = Field(default=20.0, gt=0)
    """Seconds between resumable checkpoints."""
    asynchronous: bool = True
    """Training waits only until everything is copied to host memory, and goes on while it is written. Needs
    memory for a second copy of weights and optimiser. `false`: it waits until all is on disk."""
    keep_last: int = Field(default=2, ge=1)
    """How many resumable checkpoints are kept: if the newest is found damaged, the one before it serves."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Also keeps those, of the resumable checkpoints, whose step is a multiple of it; 0: none."""
    keep_best: int = Field(default=0, ge=0)
    """Also keeps so many with the best scores: in reinforcement learning, the mean reward of the step."""
    curve_every_steps: int = Field(default=10, ge=0)
    """RL steps between weight snapshots kept for the learning curve; 0: none."""
