"""Checkpoints: whole or not there at all, checked when they are read, written while training goes on."""

from etude.training.checkpoints.files import FileFlaw, Flaw, find_flaws
from etude.training.checkpoints.history import find_resumable
from etude.training.checkpoints.keeper import CheckpointKeeper
from etude.training.checkpoints.saving import (
    WriteCheckpoint,
    has_checkpoint,
    load_checkpoint,
    load_state,
    read_state,
    save_checkpoint,
)

__all__ = [
    "CheckpointKeeper",
    "FileFlaw",
    "Flaw",
    "WriteCheckpoint",
    "find_flaws",
    "find_resumable",
    "has_checkpoint",
    "load_checkpoint",
    "load_state",
    "read_state",
    "save_checkpoint",
]
