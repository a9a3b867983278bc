"""Interfaces between the parts, one screen each. A part depends on interfaces, never on another part."""

from etude.protocols.episodes import TokenProgress as TokenProgress
from etude.protocols.executor import Executor as Executor
from etude.protocols.executor import Handle as Handle
from etude.protocols.executor import Resources as Resources
from etude.protocols.model import Attention as Attention
from etude.protocols.model import Model as Model
from etude.protocols.model import Routes as Routes
from etude.protocols.sampler import Pace as Pace
from etude.protocols.sampler import PacedSampler as PacedSampler
from etude.protocols.sampler import Sampler as Sampler
from etude.protocols.session import Action as Action
from etude.protocols.session import Archive as Archive
from etude.protocols.session import Finished as Finished
from etude.protocols.session import RunCalls as RunCalls
from etude.protocols.session import Sample as Sample
from etude.protocols.session import Session as Session
from etude.protocols.trainer import Trainer as Trainer
from etude.protocols.weights import KvPolicy as KvPolicy
from etude.protocols.weights import WeightSink as WeightSink
from etude.protocols.workspace import OnCall as OnCall
from etude.protocols.workspace import OnResult as OnResult
from etude.protocols.workspace import Workspace as Workspace
