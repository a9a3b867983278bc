"""Named, hashed versions of the weights, and their transport from the trainer to the engines."""

from etude.weights.delta import apply_update as apply_update
from etude.weights.delta import encode_update as encode_update
from etude.weights.manifest import check_staged as check_staged
from etude.weights.manifest import check_tensors as check_tensors
from etude.weights.manifest import describe_tensors as describe_tensors
from etude.weights.memory import MemoryWeights as MemoryWeights
from etude.weights.opening import check_store as check_store
from etude.weights.opening import make_subscriber as make_subscriber
from etude.weights.opening import open_publisher as open_publisher
from etude.weights.opening import open_weights as open_weights
from etude.weights.publisher import StoreWeights as StoreWeights
from etude.weights.publisher import WeightPublisher as WeightPublisher
from etude.weights.store import WeightStore as WeightStore
from etude.weights.subscriber import Subscriber as Subscriber
from etude.weights.writer import WriterOptions as WriterOptions
