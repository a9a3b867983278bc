"""How published weights travel to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.config.base import Section
from etude.config.secrets import SecretSource


class WeightsConfig(Section):
    """How published weights travel to the engines."""

    url: str = ""
    """Weight store: a directory or any URL that fsspec knows, such as `s3://bucket/run`. Empty: weights are
    handed over within the process, and no engine elsewhere can have them."""
    read_url: str = ""
    """Where engines read the store, if not at `url`: a relay of their cluster, `http://HOST:PORT`."""
    token: SecretSource = ""
    """Where the token of a relay named by `url` or `read_url` is: `file:PATH` or `env:NAME`. Empty: it asks
    for none."""
    dtype: Literal["trained", "bfloat16"] = "trained"
    """Number format in a store. `trained`: bit for bit what is trained; where that is float32, a delta is not
    much smaller than the model. `bfloat16`: rounded, and deltas tens to hundreds of times smaller; engines
    then compute with rounded weights, which importance correction must carry."""
    snapshot_every: int = Field(default=20, ge=1)
    """Versions from one full snapshot to the next: the longest chain of deltas that a newcomer reads."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Full snapshots that stay in the store, with all deltas after the oldest of them."""
    overwrite: bool = False
    """Deltas that may be applied twice; about three times as large."""
    workers: int = Field(default=1, ge=1)
    """Threads that encode a version, and that decode it."""
    wait_s: float = Field(default=60.0, gt=0)
    """How long an engine waits for a version that is still being uploaded."""
    patience_s: float = Field(default=60.0, ge=0)
    """How long trainer and engines go on asking a store, or a relay, that does not answer or is full."""
    lease_s: float = Field(default=10.0, gt=0)
    """A publisher that has not been heard of for so long is taken for dead, and another may go on instead."""
