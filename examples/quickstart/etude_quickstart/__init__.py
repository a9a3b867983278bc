"""The quickstart's tasks: two families that a configuration names, and that nothing in Étude imports.

bug_fixes:BugFixes, trail_family:Trails    what a run calls; see `etude.controller.families`
generator ──> functions, families, mutations, cases          trails      tasks and their author
observed, composed ──> acting              what only acting solves, mixed with the others
expert, observed_expert, part_expert       scripted authors, who err on purpose
playing ──> sessions, code ──> corpus      what mid-training reads; `data` holds it ready
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
