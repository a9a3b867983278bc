"""Planted code smells: ruff finds them too, and leaving or moving one does not count as solved."""

from __future__ import annotations

import asyncio
import re

import pytest

from etude.environment.making.lints import find_disagreement, find_smells
from etude.tasks.making.changes import Change
from etude.tasks.making.instructions import write_instruction
from etude.tasks.making.refactoring import SMELLS, plan_smells, write_check, write_request
from etude.tasks.making.structure_inside import NO_MODULE, find_fault

SHOP = """\
def price(amount, rate):
    if amount < 0:
        raise ValueError(amount)
    if rate and amount:
        rate = min(rate, 1)
    return amount * rate


def sign(amount):
    if amount < 0:
        return -1
    elif amount > 0:
        amount = 1
    return amount


def first(amounts):
    for amount in amounts:
        if amount < 0:
            continue
        if amount > 5:
            break
        amounts = [amount]
    return amounts + []
"""
CLEAN = "def price(amount):\n    if amount < 0:\n        return 0\n    return amount\n"
SOURCES = {"src/shop.py": SHOP, "src/other.py": CLEAN}
SMELLY = "def price(amount):\n    if amount < 0:\n        return 0\n    else:\n        return amount\n"
CHEATS = {
    "does nothing": ({}, "still has RET505 in price"),
    "suppresses the finding": (
        {"src/a.py": SMELLY.replace("else:", "else:  # noqa: RET505")},
        "still has RET505 in price",
    ),
    "hides it behind a statement that does nothing": (
        {"src/a.py": SMELLY.replace("return 0\n", "return 0\n        pass\n")},
        "still has RET505 in price",
    ),
    "deletes the function": ({"src/a.py": "price = abs\n"}, "src/a.py lacks price"),
    "deletes the module": ({"src/a.py": None}, "src/a.py lacks price"),
    "deletes another function": ({"src/a.py": CLEAN, "src/b.py": ""}, "src/b.py lacks other"),
    "leaves an alias of it": (
        {"src/a.py": CLEAN + SMELLY.replace("price", "_old") + "price = _old\n"},
        "RET505: 1, which is more than before",
    ),
    "moves it into another file": (
        {
            "src/a.py": "from c import old\n\ndef price(amount):\n    return old(amount)\n",
            "src/c.py": SMELLY.replace("price", "old"),
        },
        "RET505: 1, which is more than before",
    ),
    "makes another smell of it": (
        {"src/a.py": CLEAN.replace("return amount", "x = amount + 0\n    return x")},
        "RET504: 1, which is more than before",
    ),
    "runs it as a text": (
        {"src/a.py": f"{CLEAN}exec({SMELLY!r})\n"},
        "ways to run text as code: 1, which is more than before",
    ),
    "leaves what cannot be read beside it": (
        {"src/a.py": CLEAN, "src/a.so": NO_MODULE.decode()},
        "modules that cannot be read: 1, which is more than before",
    ),
    "declares an encoding in which a comment is code": (
        {"src/a.py": f"# coding: utf-7\n{CLEAN}#+AAo-exec('1')\n"},
        "ways to run text as code: 1, which is more than before",
    ),
}


def fault_of(changed: dict[str, str | None]) -> str | None:
    before = {"src/a.py": SMELLY.encode(), "src/b.py": b"def other():\n    return 1\n"}
    change = next(one for one in plan_smells({"src/a.py": CLEAN}, 0) if one.smell == "RET505")
    after = {path: text.encode() for path, text in changed.items() if text is not None}
    kept = {path: data for path, data in before.items() if path not in changed}
    return find_fault(write_check(change, before, ()), {**kept, **after})


def test_the_solution_counts_as_done() -> None:
    assert fault_of({"src/a.py": CLEAN}) is None


@pytest.mark.parametrize("cheat", CHEATS)
def test_what_leaves_or_moves_a_smell_does_not_count(cheat: str) -> None:
    changed, fault = CHEATS[cheat]
    found = fault_of(dict(changed))
    assert found is not None and fault in found


def test_each_smell_is_planted_and_ruff_finds_each() -> None:
    changes = list(plan_smells(SOURCES, 0))
    assert {one.smell for one in changes} == SMELLS.keys()
    assert [asyncio.run(find_disagreement(one, SOURCES)) for one in changes] == [None] * len(changes)
    clean = Change("planted_smell", "", SOURCES, changes[0].places, smell=changes[0].smell)
    assert asyncio.run(find_disagreement(clean, SOURCES)) is not None


def test_a_smell_of_the_project_has_its_fix_by_ruff_as_solution() -> None:
    async def find() -> list[Change]:
        return list(await find_smells({"src/a.py": SMELLY}, 0) or ())

    [change] = [one for one in asyncio.run(find()) if one.kind == "found_smell"]
    assert change.files == {"src/a.py": SMELLY} and change.solution == {"src/a.py": CLEAN}


def test_a_request_names_the_rule_and_the_function_and_not_the_solution() -> None:
    for change in plan_smells(SOURCES, 0):
        text = write_request(change, 0)
        assert change.smell in text and re.search(rf"`{change.places[0].name}`", text)
        assert getattr(write_instruction(change, SOURCES, {}, (), 0), "text", "") == text
