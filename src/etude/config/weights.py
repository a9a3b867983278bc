"""Checkpoints of a run, and the transport of published weights to its engines."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import SecretSource, Section


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


class WeightsConfig(Section):
    """Transport of published weights to the engines."""

    url: str = ""
    """Weight store: a directory or any URL that fsspec supports, such as `s3://bucket/run`. Empty: weights
    are passed within the process, and engines in other processes cannot read them."""
    read_url: str = ""
    """Address from which engines read the store, if it differs from `url`: a relay of their cluster,
    `http://HOST:PORT`."""
    token: SecretSource = ""
    """Source of the token of a relay named by `url` or `read_url`: `file:PATH` or `env:NAME`. Empty: none is
    sent."""
    dtype: Literal["trained", "bfloat16"] = "trained"
    """Number format in a store. `trained`: exactly what is trained; if that is float32, a delta is not much
    smaller than the model. `bfloat16`: rounded, with deltas tens to hundreds of times smaller; engines then
    compute with rounded weights, which importance correction must compensate."""
    scratch: str = ""
    """Absolute path of a directory on a local disk for the two versions that a publisher keeps: the last one
    and the one being published. Empty: they stay in memory. Only with `url`; adapters are copied completely
    each time."""
    snapshot_every: int = Field(default=20, ge=1)
    """Number of versions between two full snapshots, and so the longest chain of deltas that a new engine
    reads."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Number of full snapshots that stay in the store, with all deltas after the oldest of them."""
    overwrite: bool = False
    """Whether deltas can be applied twice; such deltas are about three times as large."""
    workers: int = Field(default=1, ge=1)
    """Number of threads that encode or decode a version."""
    wait_s: float = Field(default=60.0, gt=0)
    """Seconds that an engine waits for a version that is still being uploaded."""
    patience_s: float = Field(default=60.0, ge=0)
    """Seconds that trainer and engines keep trying a store or relay that does not answer or is full."""
    lease_s: float = Field(default=10.0, gt=0)
    """Seconds of silence after which a publisher is considered dead, and another may take over."""

    @model_validator(mode="after")
    def _scratch_is_used(self) -> WeightsConfig:
        if self.scratch and not PurePath(self.scratch).is_absolute():
            raise ValueError(f"scratch: must be an absolute path, received {self.scratch!r}")
        if self.scratch and not self.url:
            raise ValueError("scratch: needs a store; name one with url, or leave scratch out")
        return self
