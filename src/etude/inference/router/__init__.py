"""Routing over replicas: the policy, health, lending between pools, and a sampler over samplers.

The proxy is in `etude.inference.router.server`, which alone needs web libraries.
"""

from etude.inference.router.members import Members as Members
from etude.inference.router.policy import Router as Router
from etude.inference.router.sampler import RoutedSampler as RoutedSampler
from etude.inference.router.types import Ask as Ask
from etude.inference.router.types import NoReplicaError as NoReplicaError
from etude.inference.router.types import Replica as Replica
from etude.inference.router.types import ReplicaState as ReplicaState
from etude.inference.router.types import RoutingConfig as RoutingConfig
