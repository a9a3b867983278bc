"""Memory, time and cost of a run before it is begun: `etude plan`."""

from etude.controller.planning.cost import StepTimes, plan_step
from etude.controller.planning.machine import Rates, measure_rates
from etude.controller.planning.memory import MemoryPart, MemoryPlan, plan_memory
from etude.controller.planning.plan import Plan, check_fits, check_machine, make_plan
from etude.controller.planning.sizes import ModelSizes, measure_sizes

__all__ = [
    "MemoryPart",
    "MemoryPlan",
    "ModelSizes",
    "Plan",
    "Rates",
    "StepTimes",
    "check_fits",
    "check_machine",
    "make_plan",
    "measure_rates",
    "measure_sizes",
    "plan_memory",
    "plan_step",
]
