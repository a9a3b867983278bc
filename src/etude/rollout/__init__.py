"""Sessions into groups: what the trainer trains on."""

from etude.rollout.buffer import GroupBuffer
from etude.rollout.collect import Collected, Collector, GroupCollector
from etude.rollout.continuous import ContinuousCollector

__all__ = [
    "Collected",
    "Collector",
    "ContinuousCollector",
    "GroupBuffer",
    "GroupCollector",
]
