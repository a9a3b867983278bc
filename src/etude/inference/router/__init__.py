"""Routing over replicas: the policy, health, lending between pools, and a sampler over samplers.

The proxy is in `etude.inference.router.server`, which alone needs web libraries.
"""

from etude.inference.router.members import Member, Members, MemberState
from etude.inference.router.policy import Router
from etude.inference.router.sampler import RoutedSampler, SamplerReplica
from etude.inference.router.types import Ask, NoReplicaError, Replica, RoutingConfig

__all__ = [
    "Ask",
    "Member",
    "MemberState",
    "Members",
    "NoReplicaError",
    "Replica",
    "RoutedSampler",
    "Router",
    "RoutingConfig",
    "SamplerReplica",
]
