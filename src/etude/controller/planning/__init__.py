"""Memory, time and cost of a run before it is begun: `etude plan`."""

from etude.controller.planning.cost import PublicationTimes as PublicationTimes
from etude.controller.planning.cost import StepTimes as StepTimes
from etude.controller.planning.cost import plan_step as plan_step
from etude.controller.planning.machine import Rates as Rates
from etude.controller.planning.machine import measure_rates as measure_rates
from etude.controller.planning.memory import MemoryPlan as MemoryPlan
from etude.controller.planning.memory import plan_memory as plan_memory
from etude.controller.planning.parts import MemoryPart as MemoryPart
from etude.controller.planning.plan import Plan as Plan
from etude.controller.planning.plan import check_fits as check_fits
from etude.controller.planning.plan import check_machine as check_machine
from etude.controller.planning.plan import make_plan as make_plan
from etude.controller.planning.processes import Processes as Processes
from etude.controller.planning.sampling import Sampled as Sampled
from etude.controller.planning.sizes import ModelSizes as ModelSizes
from etude.controller.planning.sizes import measure_sizes as measure_sizes
