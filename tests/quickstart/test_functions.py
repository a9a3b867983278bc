"""A function's identity is its tree, not its names."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from etude_quickstart.families import FAMILIES, HELD_OUT_FAMILIES
from etude_quickstart.functions import NAMES, draw_function, function_hash, name_shape, shape_hash

RIGHT = '''def tally(xs, a):
    """Words."""
    total = 0
    for x in xs:
        total += x * a
    return total
'''


def test_hash_ignores_names_and_docstring() -> None:
    renamed = "def drift(ys, k):\n    best = 0\n    for v in ys:\n        best += v * k\n    return best\n"
    assert function_hash(RIGHT) == function_hash(renamed)


def test_hash_sees_operators_constants_order_and_builtins() -> None:
    others = [
        RIGHT.replace("*", "+"),
        RIGHT.replace("= 0", "= 1"),
        RIGHT.replace("x * a", "a * x"),
        RIGHT.replace("return total", "return len(xs)"),
        RIGHT.replace("return total", "return sum(xs)"),
        RIGHT.replace("(xs, a)", "(xs, a=2)"),
    ]
    assert len({function_hash(source) for source in [RIGHT, *others]}) == 7


def test_hash_ignores_the_name_of_an_imported_helper() -> None:
    source = "from lib.{0} import {0}\n\ndef drift(a):\n    return {0}(a) + 1\n"
    assert function_hash(source.format("tally")) == function_hash(source.format("prism"))


@given(st.integers(0, 2**32), st.sampled_from(FAMILIES + HELD_OUT_FAMILIES))
def test_the_hash_of_a_shape_is_the_hash_of_every_naming(seed: int, family: object) -> None:
    rng = Random(seed)
    shape = family.draw(rng)  # pyright: ignore[reportAttributeAccessIssue]
    for name in rng.sample(NAMES, 2):
        spec = name_shape(shape, "any", name, rng)
        assert spec.hash == function_hash(spec.source) == shape_hash(shape)


def test_naming_keeps_parameters_apart() -> None:
    for seed in range(200):
        spec = draw_function(FAMILIES[seed % len(FAMILIES)], "tally", Random(seed))
        assert len(set(spec.parameters)) == len(spec.parameters) == len(spec.kinds)
