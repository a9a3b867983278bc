"""Stored trajectories and the runs that they are from. Does not load models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from etude.config import RunConfig
from etude.observe import RunDirectory
from etude.records import Trajectory
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer

RUN_TOKENIZER = "tokenizer"
"""Directory of the tokenizer in a run that trained one."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored trajectory, and its run, if that is known."""

    trajectory: Trajectory
    run: RunDirectory | None = None

    @property
    def config(self) -> RunConfig | None:
        """The run's configuration."""
        return self.run.config if self.run else None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer, if it is stored and is the trajectory's."""
        tokenizer = None if self.run is None else run_tokenizer(self.run)
        digests = {segment.tokenizer_digest for segment in self.trajectory.segments}
        return tokenizer if tokenizer is not None and digests <= {tokenizer.digest} else None


def tokenizer_directory(run: RunDirectory) -> Path:
    """Where the tokenizer of a run is: its own, or that of the checkpoint it began with."""
    initial = run.config.initial_checkpoint
    return run.path / RUN_TOKENIZER if initial is None else Path(initial)


def run_tokenizer(run: RunDirectory) -> Tokenizer | None:
    """The tokenizer of a run; None where it has none."""
    directory = tokenizer_directory(run)
    return Tokenizer.load(directory) if (directory / TOKENIZER_FILE).is_file() else None
