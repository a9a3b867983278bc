"""Routing over replicas: policy, health, lending between pools, and a Sampler over several samplers.

The proxy is in `etude.inference.router.server`, the only part that needs web libraries.
"""

from etude.inference.router.members import Members as Members
from etude.inference.router.policy import Router as Router
from etude.inference.router.sampler import RoutedSampler as RoutedSampler
from etude.inference.router.types import NoReplicaError as NoReplicaError
from etude.inference.router.types import Replica as Replica
from etude.inference.router.types import ReplicaState as ReplicaState
from etude.inference.router.types import RouteRequest as RouteRequest
from etude.inference.router.types import RoutingConfig as RoutingConfig
