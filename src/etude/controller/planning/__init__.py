"""Estimates memory, time and cost of a run before it starts: `etude plan`."""

from etude.controller.planning.cost import StepTimes as StepTimes
from etude.controller.planning.memory import MemoryPlan as MemoryPlan
from etude.controller.planning.plan import Plan as Plan
from etude.controller.planning.plan import check_fits as check_fits
from etude.controller.planning.plan import check_machine as check_machine
from etude.controller.planning.plan import make_plan as make_plan
