"""Memory, time and cost of a run before it is begun: `etude plan`."""

from etude.controller.planning.cost import PublicationTimes, StepTimes, plan_step
from etude.controller.planning.machine import Rates, measure_rates
from etude.controller.planning.memory import MemoryPlan, plan_memory
from etude.controller.planning.parts import MemoryPart
from etude.controller.planning.plan import Plan, check_fits, check_machine, make_plan
from etude.controller.planning.processes import Processes
from etude.controller.planning.sampling import Sampled
from etude.controller.planning.sizes import ModelSizes, measure_sizes

__all__ = [
    "MemoryPart",
    "MemoryPlan",
    "ModelSizes",
    "Plan",
    "Processes",
    "PublicationTimes",
    "Rates",
    "Sampled",
    "StepTimes",
    "check_fits",
    "check_machine",
    "make_plan",
    "measure_rates",
    "measure_sizes",
    "plan_memory",
    "plan_step",
]
