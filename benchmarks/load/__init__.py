"""The load generator: plays agent sessions against a server or a sampler and measures latency and errors."""

from benchmarks.load.report import LoadReport as LoadReport
from benchmarks.load.report import summarise as summarise
from benchmarks.load.runner import LoadError as LoadError
from benchmarks.load.runner import LoadTarget as LoadTarget
from benchmarks.load.runner import TurnRecord as TurnRecord
from benchmarks.load.runner import run_load as run_load
from benchmarks.load.workload import LoadSession as LoadSession
from benchmarks.load.workload import LoadTurn as LoadTurn
from benchmarks.load.workload import LogNormal as LogNormal
from benchmarks.load.workload import WorkloadShape as WorkloadShape
from benchmarks.load.workload import synthetic_sessions as synthetic_sessions
