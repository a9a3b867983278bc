"""Code smells of a project: findings of ruff in its modules, and checks that ruff detects planted smells.

own text ──> findings of one rule in one function, all with safe fixes ──> Change, whose solution is the fixes
planted  ──> whether ruff finds the smell too

A few fixed rules are used; the project's own settings and `# noqa` comments are ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from etude.agent.tools.linters import Finding, HostRuff
from etude.tasks.making.changes import Change, round_robin
from etude.tasks.making.refactoring import SMELLS, is_removed, plan_smells
from etude.tasks.making.source import Edit, Source, apply_edits, read_sources

_RULES = f"--select={','.join(sorted(SMELLS))}"


async def find_smells(sources: Mapping[str, str], seed: int) -> Iterator[Change] | None:
    """Smells that ruff finds and planted ones in turn; None without ruff. Raises InfrastructureError."""
    ruff = HostRuff.find(_RULES)
    if ruff is None:
        return None
    return round_robin([await _find_own(ruff, sources), plan_smells(sources, seed)])


async def find_disagreement(change: Change, sources: Mapping[str, str]) -> str | None:
    """Why a planted smell is rejected: ruff does not find it; else None. Raises InfrastructureError."""
    ruff = HostRuff.find(_RULES)
    if ruff is None or change.kind != "planted_smell":
        return None
    wanted = change.smell, change.places[0].name
    counts = [
        Counter(_code_and_scope(row, source) for row in await _read_rows(ruff, source))[wanted]
        for texts in (change.files, change.solved(sources))
        for source in read_sources(texts)
    ]
    return None if counts[0] > counts[1] else f"ruff does not find it: {change.smell}"


async def _find_own(ruff: HostRuff, sources: Mapping[str, str]) -> list[Change]:
    """The project's own smells that ruff's safe fixes remove, grouped by rule and function."""
    changes: list[Change] = []
    for source in read_sources(sources):
        groups: dict[tuple[str, str], list[Any]] = {}
        for row in await _read_rows(ruff, source):
            groups.setdefault(_code_and_scope(row, source), []).append(row["fix"])
        for (code, scope), fixes in groups.items():
            if not scope or any(fix is None or fix["applicability"] != "safe" for fix in fixes):
                continue
            edits = sorted(_read_edit(one, source) for fix in fixes for one in fix["edits"])
            place = source.place(edits)
            if place.name != scope or any(one.end > two.start for one, two in pairwise(edits)):
                continue
            change = Change(
                "found_smell", SMELLS[code][0], {source.path: source.text}, (place,),
                smell=code, solution={source.path: apply_edits(source.text, edits)},
            )  # fmt: skip
            if is_removed(change, sources):
                changes.append(change)
    return changes


async def _read_rows(ruff: HostRuff, source: Source) -> list[Any]:
    found = await ruff.report(source.path, source.text.encode())
    return [] if isinstance(found, Finding) else json.loads(found)


def _code_and_scope(row: Any, source: Source) -> tuple[str, str]:
    line = row["location"]["row"]
    return str(row["code"]), source.scope_name(line, line)


def _read_edit(row: Any, source: Source) -> Edit:
    start, end = (
        source.starts[at["row"] - 1] + at["column"] - 1 for at in (row["location"], row["end_location"])
    )
    return Edit(start, end, row["content"])
