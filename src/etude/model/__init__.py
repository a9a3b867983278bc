"""Architectures, used by the trainer and the engine alike."""

from etude.model.attention import PackedAttention
from etude.model.blocks import Block, GroupedQueryBlock, LatentBlock
from etude.model.drafting import DRAFT_PREFIX, DraftLayer, DraftLayers
from etude.model.feed_forward import DenseMlp, Experts, RouterStatistics, SharedExperts
from etude.model.language_model import LanguageModel, block_of, build_model
from etude.model.ops import Ops, TorchOps
from etude.model.routes import NativeRoutes, RecordedRoutes, ReplayedRoutes, missing_route

__all__ = [
    "DRAFT_PREFIX",
    "Block",
    "DenseMlp",
    "DraftLayer",
    "DraftLayers",
    "Experts",
    "GroupedQueryBlock",
    "LanguageModel",
    "LatentBlock",
    "NativeRoutes",
    "Ops",
    "PackedAttention",
    "RecordedRoutes",
    "ReplayedRoutes",
    "RouterStatistics",
    "SharedExperts",
    "TorchOps",
    "block_of",
    "build_model",
    "missing_route",
]
