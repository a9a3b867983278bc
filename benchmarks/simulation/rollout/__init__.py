"""Rollouts and training in virtual time: the real loop and collectors around simulated parts."""

from benchmarks.simulation.rollout.engine import SimulatedEngine
from benchmarks.simulation.rollout.environment import SimulatedEnvironment
from benchmarks.simulation.rollout.sessions import SessionShape, SessionShapes, lognormal_sigma
from benchmarks.simulation.rollout.trainer import SimulatedTrainer
from benchmarks.simulation.virtual_time import run_virtual

__all__ = [
    "SessionShape",
    "SessionShapes",
    "SimulatedEngine",
    "SimulatedEnvironment",
    "SimulatedTrainer",
    "lognormal_sigma",
    "run_virtual",
]
