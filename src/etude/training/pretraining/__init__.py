"""Next-token training: on corpora, on sessions of agents, and of layers that draft."""

from etude.training.pretraining.documents import Batches, Document, ShuffledDocuments
from etude.training.pretraining.trainer import NextTokenTrainer

__all__ = ["Batches", "Document", "NextTokenTrainer", "ShuffledDocuments"]
