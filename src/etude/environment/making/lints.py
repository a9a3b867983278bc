"""What ruff finds in a project's own modules, with a fixed selection and no settings of the project's.

own text ──> findings of one rule in one function, all with safe fixes ──> Change, whose solution is the fixes
planted  ──> whether ruff finds the smell too
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from etude.agent.tools.linters import Finding, HostRuff
from etude.tasks.making.changes import Change, Rejection
from etude.tasks.making.refactoring import SMELLS, is_reached
from etude.tasks.making.source import Edit, Source, apply_edits, read_sources

RULES = f"--select={','.join(sorted(SMELLS))}"


async def find_lints(ruff: HostRuff, sources: Mapping[str, str]) -> list[Change]:
    """The project's own smells, by path, that ruff's safe fixes remove. Raises InfrastructureError."""
    changes: list[Change] = []
    for source in read_sources(sources):
        groups: dict[tuple[str, str], list[Any]] = {}
        for row in await _read_rows(ruff, source):
            groups.setdefault(_key(row, source), []).append(row["fix"])
        for (code, scope), fixes in groups.items():
            if not scope or any(fix is None or fix["applicability"] != "safe" for fix in fixes):
                continue
            edits = sorted(_edit(one, source) for fix in fixes for one in fix["edits"])
            if any(one.end > two.start for one, two in pairwise(edits)):
                continue
            solution, goal = (
                apply_edits(source.text, edits),
                {"code": code, "path": source.path, "scope": scope},
            )
            change = Change(
                "found_smell", SMELLS[code][0], {source.path: source.text}, (source.place(edits),),
                goal=goal, solution={source.path: solution},
            )  # fmt: skip
            if change.places[0].name == scope and is_reached(change, sources):
                changes.append(change)
    return changes


async def find_disagreement(ruff: HostRuff, change: Change, sources: Mapping[str, str]) -> Rejection | None:
    """Why a planted smell makes no task: ruff does not find it. Raises InfrastructureError."""
    key = change.goal["code"], change.goal["scope"]
    found = [
        Counter(_key(row, source) for row in await _read_rows(ruff, source))[key]
        for text in (change.files, sources)
        if (source := Source.parse(change.goal["path"], text[change.goal["path"]])) is not None
    ]
    return None if found[0] > found[-1] else Rejection(f"ruff does not find it: {key[0]}")


async def _read_rows(ruff: HostRuff, source: Source) -> list[Any]:
    found = await ruff.report(source.path, source.text.encode())
    return [] if isinstance(found, Finding) else json.loads(found)


def _key(row: Any, source: Source) -> tuple[str, str]:
    line = row["location"]["row"]
    return str(row["code"]), source.scope_name(line, line)


def _edit(row: Any, source: Source) -> Edit:
    start, end = (
        source.starts[at["row"] - 1] + at["column"] - 1 for at in (row["location"], row["end_location"])
    )
    return Edit(start, end, row["content"])
