"""Collects sessions into groups, which the trainer trains on."""

from etude.rollout.collect import Collected as Collected
from etude.rollout.collect import Collector as Collector
from etude.rollout.collect import GroupCollector as GroupCollector
from etude.rollout.continuous import ContinuousCollector as ContinuousCollector
