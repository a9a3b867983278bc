"""Sessions into groups: what the trainer trains on."""

from etude.rollout.buffer import GroupBuffer
from etude.rollout.collect import Collected, Collector, GroupCollector
from etude.rollout.continuous import ContinuousCollector
from etude.rollout.corpus import ScriptedSession, ScriptedTurn, generate_corpus, load_corpus, save_corpus

__all__ = [
    "Collected",
    "Collector",
    "ContinuousCollector",
    "GroupBuffer",
    "GroupCollector",
    "ScriptedSession",
    "ScriptedTurn",
    "generate_corpus",
    "load_corpus",
    "save_corpus",
]
