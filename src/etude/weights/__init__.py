"""Named, hashed sets of weights and how they travel from the trainer to the engines."""

from etude.weights.manifest import check_tensors, describe_tensors
from etude.weights.memory import MemoryWeights
from etude.weights.publisher import WeightPublisher

__all__ = ["MemoryWeights", "WeightPublisher", "check_tensors", "describe_tensors"]
