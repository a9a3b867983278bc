"""A mutation changes one line, by one node, and nothing else."""

from __future__ import annotations

import ast
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from etude_quickstart.families import FAMILIES, HELD_OUT_FAMILIES
from etude_quickstart.functions import draw_function, function_hash
from etude_quickstart.mutations import BUG_KINDS, mutations

SOURCE = '''def tally(xs, a, b):
    """Words."""
    total = 0
    for i in range(a, b + 1):
        if not i < 3 and True:
            total += max(i, b) - a
    return total
'''


def changed(source: str, kind: str) -> set[str]:
    return {
        mutation.apply(source).split("\n")[mutation.line - 1].strip()
        for mutation in mutations(source)
        if mutation.kind == kind
    }


def test_every_kind_of_change() -> None:
    assert changed(SOURCE, "operator") >= {"total += max(i, b) + a", "for i in range(a, b - 1):"}
    assert changed(SOURCE, "augmented") == {"total -= max(i, b) - a", "total *= max(i, b) - a"}
    assert "if not i <= 3 and True:" in changed(SOURCE, "comparison")
    assert changed(SOURCE, "logical") == {"if not i < 3 or True:"}
    assert changed(SOURCE, "off_by_one") >= {"total = 1", "if not i < 4 and True:"}
    assert changed(SOURCE, "boolean") == {"if not i < 3 and False:"}
    assert changed(SOURCE, "variable") >= {"return a", "total += max(i, b) - i"}
    assert changed(SOURCE, "range_end") == {"for i in range(a, b):"}
    assert changed(SOURCE, "missing_return") == {"total"}
    assert changed(SOURCE, "builtin") == {"total += min(i, b) - a"}
    assert changed(SOURCE, "swapped") >= {"total += max(b, i) - a"}


def test_negation_is_added_and_dropped() -> None:
    assert changed("def f(a):\n    if a > 1:\n        return 2\n", "negation") == {"if not a > 1:"}
    assert changed("def f(a):\n    if not a > 1:\n        return 2\n", "negation") == {"if a > 1:"}
    assert changed("def f(a, d):\n    return a in d\n", "negation") == {"return a not in d"}
    assert changed("def f(a, d):\n    return a not in d\n", "negation") == {"return a in d"}


def test_a_variable_is_only_replaced_by_one_that_has_a_value() -> None:
    source = "def f(xs, a):\n    for x in xs:\n        p = a\n    return a\n"
    assert changed(source, "variable") == {"p = x"}


def test_docstrings_and_imports_are_left_alone() -> None:
    source = 'from lib.drift import drift\n\ndef f(a):\n    """Return 1."""\n    return a\n'
    assert {mutation.line for mutation in mutations(source)} == {5}


@given(st.integers(0, 2**32), st.sampled_from(FAMILIES + HELD_OUT_FAMILIES))
def test_mutations_change_one_line_and_the_tree(seed: int, family: object) -> None:
    spec = draw_function(family, "tally", Random(seed))  # pyright: ignore[reportArgumentType]
    found = mutations(spec.source)
    assert found == mutations(spec.source)
    assert len(found) == len(set(found)) > 0
    lines = spec.source.split("\n")
    for mutation in found:
        after = mutation.apply(spec.source)
        ast.parse(after)
        pairs = zip(lines, after.split("\n"), strict=True)
        different = [line for line, (before, now) in enumerate(pairs, 1) if before != now]
        assert different == [mutation.line]
        assert mutation.kind in BUG_KINDS
        assert function_hash(after) != spec.hash
