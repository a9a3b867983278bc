"""Families of functions: docstrings in the controlled language, and sufficient variety."""

from __future__ import annotations

import ast
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude_quickstart.families import FAMILIES, HELD_OUT_FAMILIES, Family
from etude_quickstart.families.language import COMPARISONS, Phrase, comparison
from etude_quickstart.families.shape import compose
from etude_quickstart.functions import compile_functions, draw_function, shape_hash, shape_source

ALL = FAMILIES + HELD_OUT_FAMILIES


def names(families: tuple[Family, ...]) -> list[str]:
    return [family.name for family in families]


def test_there_are_many_families_with_different_names() -> None:
    assert len(set(names(ALL))) == len(ALL)
    assert len(FAMILIES) >= 40
    assert len(HELD_OUT_FAMILIES) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_functions_run_on_their_inputs_and_use_all_their_parameters(family: Family) -> None:
    rng = Random(family.name)
    num_results = 0
    for _ in range(20):
        spec = draw_function(family, "tally", rng)
        tree = ast.parse(spec.source).body[0]
        assert isinstance(tree, ast.FunctionDef)
        assert ast.get_docstring(tree) == spec.docstring
        assert 1 <= len(spec.lines) <= 8
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert set(spec.parameters) <= used
        assert spec.source.isascii()
        assert max(map(len, spec.source.split("\n"))) <= 150
        function = compile_functions([spec.source])["tally"]
        for _ in range(10):
            arguments = spec.draw_inputs(rng)
            before = repr(arguments)
            try:
                result = function(*arguments)
            except (IndexError, ZeroDivisionError):
                continue
            assert repr(arguments) == before, "a function must not change its arguments"
            assert ast.literal_eval(repr(result)) == result
            num_results += 1
    assert num_results > 100


def test_the_docstring_determines_the_function() -> None:
    rng = Random(3)
    functions: dict[str, str] = {}
    hashes: set[str] = set()
    for _ in range(150):
        for family in ALL:
            shape = family.draw(rng)
            hashes.add(shape_hash(shape))
            assert functions.setdefault(shape.docstring, shape_source(shape)) == shape_source(shape)
    assert len(hashes) > 5000


def test_held_out_families_share_no_function_with_the_others() -> None:
    rng = Random(4)
    ordinary = {shape_hash(family.draw(rng)) for family in FAMILIES for _ in range(200)}
    held_out = {shape_hash(family.draw(rng)) for family in HELD_OUT_FAMILIES for _ in range(200)}
    assert not ordinary & held_out


@given(st.integers())
def test_a_comparison_has_the_words_of_its_operator(seed: int) -> None:
    phrase = comparison(Random(seed), "x", ("a", "b"))
    tree = ast.parse(phrase.code, mode="eval").body
    assert isinstance(tree, ast.Compare)
    assert sum(f" {words} " in phrase.words for words in COMPARISONS.values()) == 1


def test_compose_reads_statements_in_order_and_leaves_silent_ones_out() -> None:
    shape = compose(
        "number",
        ("", "out = []"),
        Phrase("p = b + 1", "set p to b plus 1"),
        ("    ", Phrase("return p", "return p")),
        defaults=(("b", "3"),),
    )
    assert shape.docstring == "Default b to 3, set p to b plus 1, return p."
    assert shape.signature == ("b=3",)
    assert shape.lines == ("out = []", "p = b + 1", "    return p")
