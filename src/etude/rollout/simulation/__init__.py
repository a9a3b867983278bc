"""Rollouts and training in virtual time: the real loop and collectors around simulated parts."""

from etude.rollout.simulation.engine import SimulatedEngine
from etude.rollout.simulation.environment import SimulatedEnvironment
from etude.rollout.simulation.sessions import SessionShape, SessionShapes, lognormal_sigma
from etude.rollout.simulation.trainer import SimulatedTrainer
from etude.rollout.simulation.virtual_time import run_virtual

__all__ = [
    "SessionShape",
    "SessionShapes",
    "SimulatedEngine",
    "SimulatedEnvironment",
    "SimulatedTrainer",
    "lognormal_sigma",
    "run_virtual",
]
