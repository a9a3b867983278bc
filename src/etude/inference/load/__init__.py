"""The load generator: agent sessions against a server or a sampler, and what they saw."""

from etude.inference.load.report import LoadReport, summarise
from etude.inference.load.runner import LoadError, LoadTarget, TurnRecord, run_load
from etude.inference.load.workload import LoadSession, LoadTurn, LogNormal, WorkloadShape, synthetic_sessions

__all__ = [
    "LoadError",
    "LoadReport",
    "LoadSession",
    "LoadTarget",
    "LoadTurn",
    "LogNormal",
    "TurnRecord",
    "WorkloadShape",
    "run_load",
    "summarise",
    "synthetic_sessions",
]
