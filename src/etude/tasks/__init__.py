"""Tasks: generated bug fixing, Harbor directories, and the scripted expert."""

from etude.tasks.code import code_documents
from etude.tasks.expert import Expert
from etude.tasks.frozen import evaluation_tasks
from etude.tasks.generator import SPLITS, Split, TaskGenerator
from etude.tasks.harbor import read_harbor, write_harbor
from etude.tasks.skill import PERFECT_SKILL, ExpertSkill

__all__ = [
    "PERFECT_SKILL",
    "SPLITS",
    "Expert",
    "ExpertSkill",
    "Split",
    "TaskGenerator",
    "code_documents",
    "evaluation_tasks",
    "read_harbor",
    "write_harbor",
]
