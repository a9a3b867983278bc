"""Weight updates as small, exact, checksummed deltas; `encode_update` and `apply_update` work standalone.

A step of reinforcement learning changes few of the served weights: with a learning rate of 1e-6 about one
bfloat16 number in a hundred reaches the next representable one. Which ones depends above all on the exponent.
So the gaps between changes are coded per range of exponents, and the changes as differences of bit patterns;
both with an entropy coder (interleaved rANS).
"""

from etude.weights.delta.container import UpdateManifest as UpdateManifest
from etude.weights.delta.container import read_update_manifest as read_update_manifest
from etude.weights.delta.update import KernelChoice as KernelChoice
from etude.weights.delta.update import apply_update as apply_update
from etude.weights.delta.update import encode_update as encode_update
from etude.weights.delta.update import write_update as write_update
