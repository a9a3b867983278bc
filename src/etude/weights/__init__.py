"""Named, hashed sets of weights and how they travel from the trainer to the engines."""

from etude.weights.delta import apply_update, encode_update
from etude.weights.manifest import check_staged, check_tensors, describe_tensors
from etude.weights.memory import MemoryWeights
from etude.weights.opening import check_store, make_subscriber, open_publisher, open_weights
from etude.weights.publisher import StoreWeights, WeightPublisher
from etude.weights.store import WeightStore
from etude.weights.subscriber import Subscriber
from etude.weights.writer import WriterOptions

__all__ = [
    "MemoryWeights",
    "StoreWeights",
    "Subscriber",
    "WeightPublisher",
    "WeightStore",
    "WriterOptions",
    "apply_update",
    "check_staged",
    "check_store",
    "check_tensors",
    "describe_tensors",
    "encode_update",
    "make_subscriber",
    "open_publisher",
    "open_weights",
]
