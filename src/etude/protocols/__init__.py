"""The seams between the parts, one screen each. A part knows a seam, never the other part."""

from etude.protocols.episodes import EpisodeRunner, TokenTally
from etude.protocols.executor import Executor, Handle, Resources
from etude.protocols.model import Attention, Model, Routes
from etude.protocols.sampler import BranchingSampler, Pace, PacedSampler, Sampler
from etude.protocols.session import Action, Archive, Finished, RunCalls, Sample, Session
from etude.protocols.trainer import Trainer
from etude.protocols.weights import KvPolicy, WeightSink
from etude.protocols.workspace import OnCall, OnResult, Workspace

__all__ = [
    "Action",
    "Archive",
    "Attention",
    "BranchingSampler",
    "EpisodeRunner",
    "Executor",
    "Finished",
    "Handle",
    "KvPolicy",
    "Model",
    "OnCall",
    "OnResult",
    "Pace",
    "PacedSampler",
    "Resources",
    "Routes",
    "RunCalls",
    "Sample",
    "Sampler",
    "Session",
    "TokenTally",
    "Trainer",
    "WeightSink",
    "Workspace",
]
