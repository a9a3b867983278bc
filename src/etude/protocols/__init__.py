"""The seams between the parts, one screen each. A part knows a seam, never the other part."""

from etude.protocols.executor import Executor, Handle, Resources
from etude.protocols.model import Attention, Model, Routes
from etude.protocols.sampler import Sampler
from etude.protocols.session import Action, Archive, Finished, RunCalls, Sample, Session
from etude.protocols.trainer import Trainer
from etude.protocols.weights import KvPolicy, WeightSink
from etude.protocols.workspace import OnCall, OnResult, Workspace

__all__ = [
    "Action",
    "Archive",
    "Attention",
    "Executor",
    "Finished",
    "Handle",
    "KvPolicy",
    "Model",
    "OnCall",
    "OnResult",
    "Resources",
    "Routes",
    "RunCalls",
    "Sample",
    "Sampler",
    "Session",
    "Trainer",
    "WeightSink",
    "Workspace",
]
