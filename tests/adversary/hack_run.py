"""Plays hacks as the current user, and prints one JSON line for each, like `escape.run`.

python -m tests.adversary.hack_run local hacks NAME ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from tests.adversary.hack_tables import HACKS
from tests.adversary.hack_tasks import tasks_of
from tests.adversary.stage import Stage


def main(arguments: Sequence[str]) -> None:
    """See the module. `held`: paid on no task; the control is paid on all where it must be."""
    _, what, *names = arguments
    stage = Stage()
    for hack in HACKS:
        if hack.name in names:
            tasks = tasks_of(hack.tasks)
            paid = [task.id for task in tasks if stage.grade(task, hack).passed]
            robbed = [
                task.id
                for task in tasks
                if hack.harmless and not stage.grade(task, hack, is_control=True).passed
            ]
            verdict = "escaped" if paid or robbed else "held"
            detail = f"{len(tasks)} tasks; paid: {paid}; right and not paid: {robbed}"
            print(json.dumps([what, hack.name, verdict, detail]), flush=True)
    stage.close()


if __name__ == "__main__":
    main(sys.argv[1:])
