"""Updating weights: next-token training, the RL step, optimisers, checkpoints."""

from etude.training.checkpoints import load_checkpoint as load_checkpoint
from etude.training.checkpoints import save_checkpoint as save_checkpoint
from etude.training.pretraining import Document as Document
from etude.training.pretraining import NextTokenTrainer as NextTokenTrainer
from etude.training.pretraining import ShuffledDocuments as ShuffledDocuments
from etude.training.rl import RlTrainer as RlTrainer
