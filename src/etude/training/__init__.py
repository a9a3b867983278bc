"""Updating weights: next-token training, the RL step, optimisers, checkpoints."""

from etude.training.checkpoints import has_checkpoint, load_checkpoint, save_checkpoint
from etude.training.pretraining import Document, NextTokenTrainer, ShuffledDocuments, evaluate_loss
from etude.training.rl import RlTrainer

__all__ = [
    "Document",
    "NextTokenTrainer",
    "RlTrainer",
    "ShuffledDocuments",
    "evaluate_loss",
    "has_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
