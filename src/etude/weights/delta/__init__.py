"""Weight updates as small, exact, checked deltas: `encode_update` and `apply_update` stand alone.

A step of reinforcement learning changes few of the weights that are served: with a learning rate of 1e-6
about one bfloat16 number in a hundred reaches the next representable one. Which ones depends above all on the
exponent. So the gaps between changes are coded range by range of exponents, and the changes themselves as
steps of the bit patterns; both by an entropy coder (interleaved rANS).
"""

from etude.weights.delta.choosing import KernelChoice
from etude.weights.delta.container import UpdateManifest, read_update_manifest
from etude.weights.delta.update import apply_update, encode_update, write_update

__all__ = [
    "KernelChoice",
    "UpdateManifest",
    "apply_update",
    "encode_update",
    "read_update_manifest",
    "write_update",
]
