"""Makes verified tasks from a project, whose tests run in sandboxes: with its own text, and with changes.

project ──> image ──> baseline ──> candidates, each verified ──> selection, each checked ──> Harbor tasks
(`projects`) (`images`) (`suites`)        (`verifying`)               (`pipeline`, `writing`)

The pure parts, which choose changes, wording and tasks, are in `etude.tasks.making`.
"""
