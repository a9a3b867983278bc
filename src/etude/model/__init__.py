"""Model architectures, shared by the trainer and the engine."""

from etude.model.attention import PackedAttention as PackedAttention
from etude.model.blocks import Block as Block
from etude.model.blocks import GroupedQueryBlock as GroupedQueryBlock
from etude.model.blocks import LatentBlock as LatentBlock
from etude.model.drafting import DRAFT_PREFIX as DRAFT_PREFIX
from etude.model.drafting import DraftLayer as DraftLayer
from etude.model.drafting import DraftLayers as DraftLayers
from etude.model.feed_forward import DenseMlp as DenseMlp
from etude.model.feed_forward import Experts as Experts
from etude.model.feed_forward import RouterStatistics as RouterStatistics
from etude.model.feed_forward import SharedExperts as SharedExperts
from etude.model.language_model import LanguageModel as LanguageModel
from etude.model.language_model import block_of as block_of
from etude.model.language_model import build_model as build_model
from etude.model.ops import Ops as Ops
from etude.model.ops import TorchOps as TorchOps
from etude.model.routes import NativeRoutes as NativeRoutes
from etude.model.routes import RecordedRoutes as RecordedRoutes
from etude.model.routes import ReplayedRoutes as ReplayedRoutes
from etude.model.routes import missing_route as missing_route
