"""Optimisers: Muon for matrices, AdamW for the rest, schedules, clipping, skipping of non-finite steps."""

from etude.training.optimizer.offending import OffendingBatches
from etude.training.optimizer.optimizer import Optimizer

__all__ = ["OffendingBatches", "Optimizer"]
