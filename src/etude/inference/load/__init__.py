"""The load generator: agent sessions against a server or a sampler, and what they saw."""

from etude.inference.load.report import LoadReport as LoadReport
from etude.inference.load.report import summarise as summarise
from etude.inference.load.runner import LoadError as LoadError
from etude.inference.load.runner import LoadTarget as LoadTarget
from etude.inference.load.runner import TurnRecord as TurnRecord
from etude.inference.load.runner import run_load as run_load
from etude.inference.load.workload import LoadSession as LoadSession
from etude.inference.load.workload import LoadTurn as LoadTurn
from etude.inference.load.workload import LogNormal as LogNormal
from etude.inference.load.workload import WorkloadShape as WorkloadShape
from etude.inference.load.workload import synthetic_sessions as synthetic_sessions
