"""The quickstart's tasks: two task families that a configuration names and Étude does not import.

bug_fixes:BugFixes, trail_family:Trails    the families; see `etude.controller.families`
generator ──> functions, families, mutations, cases          trails      tasks and their author
observed, composed ──> acting              tasks that require running the tests, mixed with the others
expert, observed_expert, part_expert       scripted authors, which make mistakes on purpose
playing ──> sessions, code ──> corpus      mid-training data; `data` has it ready-made
frozen                                     evaluation tasks, with committed digests
"""

from etude_quickstart.code import code_documents
from etude_quickstart.expert import Expert
from etude_quickstart.frozen import evaluation_tasks
from etude_quickstart.generator import SPLITS, Split, TaskGenerator
from etude_quickstart.skill import PERFECT_SKILL, ExpertSkill

__all__ = [
    "PERFECT_SKILL",
    "SPLITS",
    "Expert",
    "ExpertSkill",
    "Split",
    "TaskGenerator",
    "code_documents",
    "evaluation_tasks",
]
