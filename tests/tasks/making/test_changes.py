"""Planted bugs, deletions and combinations: edits by position that parse and can be undone."""

from __future__ import annotations

import ast
import inspect
import json.decoder
import textwrap
from itertools import islice

import pytest

from etude.tasks.making.bugs import combine, plan_bugs
from etude.tasks.making.changes import Change, split_of
from etude.tasks.making.deletions import plan_deletions
from etude.tasks.making.source import Edit, Source, apply_edits
from etude.tasks.making.tokens import changed_lines

REAL = {
    f"lib/{module.__name__}.py": inspect.getsource(module)
    for module in (textwrap, json.decoder)  # pyright: ignore[reportAttributeAccessIssue]
}


HANDLERS = (
    "if 1:\n    try:\n        f()\n    except KeyError:\n        pass\n    except OSError:\n        raise"
)
ACCUMULATED = "def f(a):\n    a = g(a)\n    a += h(a)\n    return a\n"


def planted(source: str, operator: str) -> set[str]:
    """The lines that planted bugs of an operator write, stripped; what they remove is left out."""
    found = set[str]()
    for change in plan_bugs({"a.py": textwrap.dedent(source)}, 0):
        if change.operator == operator:
            new = change.files["a.py"].split("\n")
            spans = [one for one, _ in changed_lines(change.files["a.py"], textwrap.dedent(source))]
            found |= {"; ".join(line.strip() for line in new[slice(*span)]) for span in spans}
    return found


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("inverted condition", "def f(é, b):\n    if 'é' == é: return b", "if 'é' != é: return b"),
        ("inverted condition", "def f(a, b):\n    if a:\n        return b", "if not a:"),
        ("inverted condition", "def f(a, b):\n    return a not  in b", "return a in b"),
        ("shifted boundary", "def f(a, b):\n    return a < b", "return a <= b"),
        ("shifted boundary", "def f(a):\n    return a[1:]", "return a[2:]"),
        ("shifted boundary", "def f(a):\n    return a[-1]", "return a[-2]"),
        ("changed operator", "def f(a, b):\n    a -= b\n    return a", "a += b"),
        ("lost accumulation", "def f(a, b):\n    a += b\n    return a", "a = b"),
        ("changed logic", "def f(a, b):\n    return a and b", "return a or b"),
        ("dropped condition", "def f(a, b):\n    return (a and (b or 1))", "return (a)"),
        ("changed constant", "def f(a):\n    return a(True)", "return a(False)"),
        ("swapped arguments", "def f(a, b):\n    return g(a, b)", "return g(b, a)"),
        ("dropped argument", "def f(a, b):\n    return g(a, key=b)", "return g(a)"),
        ("swapped elements", "def f(a, b):\n    return a, b", "return b, a"),
        ("wrong method", "def f(a):\n    return a.upper()", "return a.lower()"),
        ("wrong variable", "def f(a, b):\n    return a + 1", "return b + 1"),
        ("removed wrapper", "def f(a):\n    return a.strip()", "return a"),
        ("removed wrapper", "class A:\n    @property\n    def f(self):\n        return 1", ""),
        ("shared mutable", "def f(a):\n    return list(a)", "return a"),
        ("shared mutable", "def f(a=None):\n    if a is None:\n        a = []\n    return a", "def f(a=[]):"),
        ("removed assignment", "def f(a):\n    a = g(a)\n    return a", ""),
        ("removed call", "def f(a):\n    a.sort()\n    return a", ""),
        ("removed guard", "def f(a):\n    if a:\n        return 1\n    return 2", ""),
        ("removed branch", "def f(a):\n    if a:\n        a = 1\n    else:\n        a = 2\n    return a", ""),
        (
            "removed handler",
            HANDLERS,
            "",
        ),
        ("loop runs once", "def f(a):\n    for x in a:\n        g(x)\n    return a", "break"),
        ("changed jump", "def f(a):\n    for x in a:\n        if x:\n            break", "continue"),
        ("lost return", "def f(a):\n    return g(a)", "g(a)"),
        ("exception kind", "def f(a):\n    raise ValueError(a)", "raise TypeError(a)"),
        ("base class", "class A(B, C):\n    x = 1", "class A(C, B):"),
        ("dropped method", "class A(B):\n    x = 1\n    def __eq__(self, o):\n        return 1", ""),
        ("changed default", "def f(a=True):\n    return a", "def f(a=False):"),
        (
            "reordered statements",
            ACCUMULATED,
            "a += h(a); a = g(a)",
        ),
    ],
)
def test_each_operator_edits_the_text_by_position(operator: str, before: str, after: str) -> None:
    found = planted(before, operator)
    assert after in found or (operator == "reordered statements" and found), found


@pytest.mark.parametrize(
    "source",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = True\n",
        'def f(a: "x and y" = None) -> Literal[True]:\n    """True"""\n',
        "__all__ = ['one', 'two']\n",
        "x = 1\r\nif x < 2:\r\n    x = 3\r\n",
        "def f(:\n",
    ],
)
def test_what_does_not_run_or_parse_is_left_alone(source: str) -> None:
    assert list(plan_bugs({"a.py": source}, 0)) == []


def test_tests_and_packaging_are_left_alone() -> None:
    text = "def f(a):\n    return a < 1\n"
    assert not list(plan_bugs(dict.fromkeys(("tests/a.py", "test_a.py", "setup.py", "a.txt"), text), 0))


def _check(change: Change, sources: dict[str, str]) -> None:
    for path, text in change.files.items():
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(sources[path]))
        lines, own = text.split("\n"), sources[path].split("\n")
        for one, two in reversed(list(changed_lines(text, sources[path]))):
            lines[slice(*one)] = own[slice(*two)]
            if change.kind != "combined":
                place = change.places[0]
                assert place.first_line - 1 <= two[0] <= two[1] <= place.last_line + 1
        assert lines == own  # taking the changed places back gives the project's own text


def test_every_planted_bug_of_real_modules_parses_differs_and_can_be_undone() -> None:
    changes = list(islice(plan_bugs(REAL, 3), 60))
    assert len(changes) == 60
    assert len({change.operator for change in changes}) >= 20
    assert len({change.id for change in changes}) == 60
    for change in changes:
        _check(change, REAL)
    assert changes == list(islice(plan_bugs(REAL, 3), 60))


def test_deletions_of_real_modules_keep_docstrings() -> None:
    changes = list(plan_deletions(REAL, 0))
    assert {change.operator for change in changes} >= {"emptied function", "emptied class"}
    for change in changes:
        _check(change, REAL)
        for path, text in change.files.items():
            if change.operator == "emptied function":
                assert text.count('"""') == REAL[path].count('"""')
                assert "raise NotImplementedError" in text


def test_a_function_that_others_name_is_emptied_and_not_removed() -> None:
    body = '    """Adds."""\n    a = b\n    b = a\n    return a + b\n'
    source = f"x = 1\n\ndef one(a, b):\n{body}\n\ndef two(a, b):\n{body}    \nprint(two(1, 2))\n"
    removed = [one for one in plan_deletions({"a.py": source}, 0) if one.operator == "removed function"]
    assert [change.places[0].name for change in removed] == ["one"]


def test_functions_of_other_functions_are_emptied_with_them() -> None:
    inner = "        def inner(c):\n            c += 1\n            c += b\n            return c\n"
    outer = f"def outer(a, b):\n    if a:\n{inner}        return inner(a)\n    return b\n"
    source = f"{outer}\n\ndef other(a):\n    b = a\n    b += 1\n    return b\n"
    planned = {one.operator: one for one in plan_deletions({"a.py": source}, 0)}
    assert "inner" not in planned["emptied module"].files["a.py"]
    emptied = [one for one in plan_deletions({"a.py": source}, 0) if one.operator == "emptied function"]
    assert {one.places[0].name for one in emptied} == {"outer", "other"}


def test_combined_changes_are_of_one_split_and_hold_every_part() -> None:
    sources = REAL
    parts = {change.id: change for change in islice(plan_bugs(sources, 0), 30)}
    combined = list(islice(combine(list(parts.values()), sources, 0), 8))
    assert len(combined) == 8
    for change in combined:
        _check(change, sources)
        assert len({split_of(path) for path in change.files}) == 1
        for part in change.parts:
            for path, text in parts[part].files.items():
                for one, _ in changed_lines(text, sources[path]):
                    assert "\n".join(text.split("\n")[slice(*one)]) in change.files[path]
    assert any(len(change.parts) == 3 for change in combined)


def test_edits_that_overlap_are_refused() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        apply_edits("abc", [Edit(0, 2, "x"), Edit(1, 3, "y")])


def test_offsets_count_characters_where_trees_count_bytes() -> None:
    source = Source.parse("a.py", "x = 'é𝄞' < 'ü'\n")
    assert source is not None
    compare = source.tree.body[0].value  # pyright: ignore[reportAttributeAccessIssue]
    assert source.segment(compare.comparators[0]) == "'ü'"
