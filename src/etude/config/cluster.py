"""Where the parts of a run are under `executor = "ray"`, and what is done when one of them fails."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]


class PartConfig(Section):
    """What one part takes of a machine, as Ray counts it: reserved, not enforced."""

    cpus: float = Field(default=1.0, ge=0)
    """Cores. How many threads compute is said elsewhere: `num_threads`, `engine.native_threads`."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs; unset: 1 with `device = "cuda"`, with vLLM as many as it divides a replica over, else 0."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory; 0: not counted."""
    failure_domain: str = ""
    """Only on machines that were started with the label `etude-domain` of this value; empty: on any."""


class ClusterConfig(Section):
    """The parts of a run under `executor = "ray"`, and how their failures are mended."""

    address: str = ""
    """`HOST:PORT` of a Ray cluster's head; empty: Ray is started on this machine, for this run, and listens
    on loopback alone."""
    connect_timeout_s: float = Field(default=15.0, gt=0)
    """How long that address may take to answer."""
    engines: int = Field(default=1, ge=1)
    """Engine replicas, a process each."""
    workers: int = Field(default=0, ge=0)
    """Rollout workers that the run begins with, a process each: agents, sandboxes and grading. 0: sessions
    are in the run's own process. `etude workers` changes their number while the run goes on."""
    most_workers: int = Field(default=0, ge=0)
    """Above `workers`: as many as Ray has room for, up to so many; they join when there is room, be it on a
    new machine. 0: no more than `workers`."""
    drain_s: float = Field(default=600.0, ge=0)
    """How long a worker that is to leave may play its sessions to their end; those that are left begin anew
    with others."""
    trainer: PartConfig = PartConfig()
    """What the trainer takes."""
    engine: PartConfig = PartConfig()
    """What each engine replica takes."""
    worker: PartConfig = PartConfig()
    """What each rollout worker takes, its sandboxes included; no GPU unless it says so."""
    evaluation: PartConfig = PartConfig()
    """What the evaluation of `evaluation.every_steps` takes: it has an engine of its own."""
    placement: Placement = "pack"
    """`pack`: few machines. `spread`: many. `strict_pack`: one, `strict_spread`: a machine for each part, or
    the run does not begin."""
    placement_timeout_s: float = Field(default=60.0, gt=0)
    """How long Ray may take to find room for all parts."""
    weights_directory: str = ""
    """Where weights lie on their way to the engines, unless `weights.url` names a store: a directory that all
    machines see. Empty: `weights` in the run's directory, which the trainer's must see anyway."""
    object_store_bytes: int = Field(default=256 << 20, ge=80 << 20)
    """Shared memory of a Ray that is started for this run."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """How long the process of a part may take to come up."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Between two heartbeats of a part."""
    silent_s: float = Field(default=60.0, gt=0)
    """A part that answers no heartbeat for so long is ended and started again."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Before a part is started again; doubled with each failure in a row."""
    most_backoff_s: float = Field(default=30.0, ge=0)
    """Longest such wait."""
    healthy_s: float = Field(default=10.0, gt=0)
    """A part that lived so long starts a new row of failures."""
    give_up_after: int = Field(default=8, ge=1)
    """Failures in a row after which a part is started no more. The run ends, resumable, unless others of its
    kind are left."""
    quarantine_after: int = Field(default=3, ge=1)
    """Failures on one machine, within `quarantine_s`, after which no part is started there."""
    quarantine_s: float = Field(default=600.0, gt=0)
    """How long a machine is avoided."""
    patience_s: float = Field(default=300.0, gt=0)
    """How long a session waits for an engine, or the loop for the trainer, to come back."""
    max_attempts: int = Field(default=8, ge=1)
    """Times a session is begun where the infrastructure fails."""
    max_replay_steps: int = Field(default=16, ge=1)
    """A checkpoint is due after so many steps, whatever `checkpoint.every_s` says: the batches since the last
    one are kept in memory, to train a new trainer process on them again."""

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
