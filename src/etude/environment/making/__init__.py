"""Makes verified tasks from a project, whose tests run in sandboxes: with its own text, and with changes.

project ──> image ──> baseline ──> candidates, each verified ──> selection, each checked ──> Harbor tasks
(`projects`) (`images`) (`suites`)        (`verifying`)               (`pipeline`, `writing`)

What is changed, and how tasks are worded and chosen, is pure and stands in `etude.tasks.making`.
"""
