"""Placement of a run's parts under `executor = "ray"`, and recovery from their failures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]


class PartConfig(Section):
    """Resources of a machine that one part reserves with Ray. Ray counts them; it does not enforce them."""

    cpus: float = Field(default=1.0, ge=0)
    """Cores. The number of compute threads is set by `num_threads` and `engine.native_threads`."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs. Unset: 1 with `device = "cuda"`; with vLLM as many as one replica uses; otherwise 0."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory; 0 reserves none."""
    failure_domain: str = ""
    """Places the part only on machines that were started with the label `etude-domain` of this value. Empty:
    on any machine."""


class ClusterConfig(Section):
    """The parts of a run under `executor = "ray"`, and how the run recovers from their failures."""

    address: str = ""
    """`HOST:PORT` of a Ray cluster's head. Empty: Ray is started on this machine for this run, and listens on
    loopback only."""
    connect_timeout_s: float = Field(default=15.0, gt=0)
    """Seconds to wait for that address to answer."""
    engines: int = Field(default=1, ge=1)
    """Number of engine replicas, each in a process of its own."""
    workers: int = Field(default=0, ge=0)
    """Number of rollout workers at the start, each a process with agents, sandboxes and grading. 0: sessions
    run in the run's own process. `etude workers` changes the number while the run is in progress."""
    most_workers: int = Field(default=0, ge=0)
    """Largest number of rollout workers. If it is above `workers`, more of them join as soon as Ray has room,
    also on machines that are added later. 0: never more than `workers`."""
    drain_s: float = Field(default=600.0, ge=0)
    """Seconds that a worker which leaves may take to finish its sessions. Unfinished ones start again on
    other workers."""
    trainer: PartConfig = PartConfig()
    """Resources of the trainer."""
    engine: PartConfig = PartConfig()
    """Resources of each engine replica."""
    worker: PartConfig = PartConfig()
    """Resources of each rollout worker, its sandboxes included. No GPU by default."""
    evaluation: PartConfig = PartConfig()
    """Resources of the evaluation of `evaluation.every_steps`, which has an engine of its own."""
    placement: Placement = "pack"
    """How parts are placed. `pack`: on few machines. `spread`: over many machines. `strict_pack`: all on one
    machine; `strict_spread`: each on a machine of its own; the run does not start if that is impossible."""
    placement_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that Ray may take to find room for all parts."""
    weights_directory: str = ""
    """Directory for weights on their way to the engines, if `weights.url` names no store. All machines must
    see it. Empty: `weights` in the run's directory."""
    object_store_bytes: int = Field(default=256 << 20, ge=80 << 20)
    """Size of the shared memory of a Ray that is started for this run."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a part's process may take to start."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two heartbeats of a part."""
    silent_s: float = Field(default=60.0, gt=0)
    """Seconds without an answered heartbeat after which a part is killed and started again."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Seconds before a failed part is started again. The wait doubles with each consecutive failure."""
    most_backoff_s: float = Field(default=30.0, ge=0)
    """Longest such wait in seconds."""
    healthy_s: float = Field(default=10.0, gt=0)
    """Seconds without a failure after which the count of consecutive failures starts again."""
    give_up_after: int = Field(default=8, ge=1)
    """Consecutive failures after which a part is not started again. The run then ends, resumable, unless
    other parts of the same kind are left."""
    quarantine_after: int = Field(default=3, ge=1)
    """Failures on one machine within `quarantine_s` after which no part is started there."""
    quarantine_s: float = Field(default=600.0, gt=0)
    """Seconds for which such a machine is avoided."""
    patience_s: float = Field(default=300.0, gt=0)
    """Seconds that a session waits for an engine, or the loop for the trainer, to come back."""
    max_attempts: int = Field(default=8, ge=1)
    """Number of times that a session is started if the infrastructure fails."""
    max_replay_steps: int = Field(default=16, ge=1)
    """Largest number of steps between two checkpoints, whatever `checkpoint.every_s` says. The batches since
    the last checkpoint are kept in memory, so that a new trainer process can train on them again."""

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterConfig:
        host, colon, port = self.address.rpartition(":")
        if self.address and not (host and colon and port.isdigit()):
            raise ValueError(f"address: must be HOST:PORT, received {self.address!r}")
        if self.most_workers and not 1 <= self.workers <= self.most_workers:
            raise ValueError(
                f"workers: must be 1 to most_workers={self.most_workers}, received {self.workers}"
            )
        if self.silent_s <= self.heartbeat_s:
            raise ValueError(
                f"silent_s: must be above heartbeat_s={self.heartbeat_s}, received {self.silent_s}"
            )
        return self
