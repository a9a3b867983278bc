"""Sampling: the engine, and the service that many sessions share."""

from etude.inference.engine import Engine, EngineCounters
from etude.inference.service import EngineService, ServiceTimes, StepSums
from etude.inference.slots import FinishedRequest

__all__ = ["Engine", "EngineCounters", "EngineService", "FinishedRequest", "ServiceTimes", "StepSums"]
