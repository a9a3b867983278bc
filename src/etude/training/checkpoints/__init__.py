"""Checkpoints: whole or not there at all, checked when they are read, written while training goes on."""

from etude.training.checkpoints.files import FileFlaw, Flaw, find_flaws
from etude.training.checkpoints.history import find_resumable
from etude.training.checkpoints.keeper import CheckpointKeeper, FollowingWriter
from etude.training.checkpoints.saving import (
    Stored,
    WriteCheckpoint,
    has_checkpoint,
    load_checkpoint,
    load_state,
    load_stored,
    read_state,
    save_checkpoint,
)
from etude.training.checkpoints.shards import ModelShards, without_model

__all__ = [
    "CheckpointKeeper",
    "FileFlaw",
    "Flaw",
    "FollowingWriter",
    "ModelShards",
    "Stored",
    "WriteCheckpoint",
    "find_flaws",
    "find_resumable",
    "has_checkpoint",
    "load_checkpoint",
    "load_state",
    "load_stored",
    "read_state",
    "save_checkpoint",
    "without_model",
]
