"""Observed: tasks whose rule nothing but a test run tells.

One expression of a function is wrong. What is right is one of eight rules of its kind: a constant, a
comparison or an operator. The docstring says nothing of it, and the visible test knows it only as a SHA-256
digest, so that all eight are equally likely given the instruction and every file. The test runner prints the
value that the test expected, one digit, and each rule of a kind has a digit of its own:

    FAIL test_tally: 2 != 5        constant: 5 is the constant; comparison and operator: one look-up

An agent that edits before it has run the tests is therefore right at most once in eight (`CEILING`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random
from typing import Any, Literal, get_args

from etude.errors import TaskError
from etude.records import Task
from etude.tasks.cases import Case, Cases, test_file
from etude.tasks.families import Shape
from etude.tasks.functions import NAMES, FunctionSpec, compile_functions, name_shape, shape_hash
from etude.tasks.generator import (
    ALLOWED_PATHS,
    HIDDEN_TESTS,
    INSTRUCTIONS,
    VISIBLE_TESTS,
    TaskGenerator,
)

ObservedKind = Literal["constant", "comparison", "operator"]
OBSERVED_KINDS: tuple[ObservedKind, ...] = get_args(ObservedKind)
ObservedSplit = Literal["train", "validation", "heldout"]
OBSERVED_SPLITS: tuple[ObservedSplit, ...] = get_args(ObservedSplit)

NUM_RULES = 8
CEILING = 1 / NUM_RULES
"""The largest share of right first edits without a test run."""
_NUM_HIDDEN = 16
_MOST_ATTEMPTS = 1000
_SPLIT_OF_DIGIT: dict[int, ObservedSplit] = {4: "validation", 6: "heldout", 9: "heldout"}
"""Functions with these constants are of no other split, whatever their rule."""
_PHRASE = "what the test says"
_MASK = ("    assert ", " == ", "    assert (", ") is True\n")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Eight expressions, a ninth that stands in the broken file, and the call that tells them apart."""

    broken: str
    rules: tuple[str, ...]
    arguments: dict[str, Any]
    """What the visible test passes; the parameter `c`, where there is one, is 0."""


_KINDS: dict[ObservedKind, _Kind] = {
    "constant": _Kind("a + 0", tuple(f"a + {number}" for number in range(1, 9)), {"a": 0}),
    "comparison": _Kind(
        "sum(x == a for x in xs)",
        tuple(
            f"sum(x {symbol} {bound} for x in xs)"
            for bound in ("a", "b")
            for symbol in ("<", "<=", ">", ">=")
        ),
        {"xs": [1, 3, 3, 3, 3, 5, 7, 7], "a": 3, "b": 7},
    ),
    "operator": _Kind(
        "(a << b) % 10",
        tuple(f"(a {symbol} b) % 10" for symbol in ("+", "-", "*", "//", "%", "&", "|", "^")),
        {"a": 6, "b": 13},
    ),
}


def _frames() -> tuple[tuple[str, tuple[str, ...], ObservedSplit], ...]:
    """(docstring, body, split) around the expression; all return its value where c is 0."""
    found: list[tuple[str, tuple[str, ...], ObservedSplit]] = [
        (f"Return {_PHRASE}.", ("return {rule}",), "train")
    ]
    for digit in range(2, 10):
        split: ObservedSplit = _SPLIT_OF_DIGIT.get(digit, "train")
        found += [
            (f"Return c times {digit} plus {_PHRASE}.", (f"return c * {digit} + {{rule}}",), split),
            (
                f"Set total to {_PHRASE}, return total plus c times {digit}.",
                ("total = {rule}", f"return total + c * {digit}"),
                split,
            ),
            (
                f"If c above {digit}, return c, else return {_PHRASE}.",
                (f"if c > {digit}:", "    return c", "return {rule}"),
                split,
            ),
        ]
    return tuple(found)


_FRAMES = _frames()


def observed_shape(kind: ObservedKind, frame: int, rule: int | None) -> Shape:
    """The function with this rule, or as it is broken (None)."""
    words, body, _ = _FRAMES[frame]
    expression = _KINDS[kind].broken if rule is None else _KINDS[kind].rules[rule]
    order = [name for name in ("xs", "a", "b") if name in _KINDS[kind].arguments]
    parameters = (*order, "c") if frame else tuple(order)
    return Shape(parameters, words, tuple(line.format(rule=expression) for line in body), "number")


class ObservedGenerator:
    """Tasks by index, each a pure function of (seed, split, index). Raises TaskError for an unknown split.

    Functions of one split are never in another; their rule is drawn anew for each task.
    """

    def __init__(self, seed: int, split: ObservedSplit = "train") -> None:
        if split not in OBSERVED_SPLITS:
            fix = f"one of {', '.join(OBSERVED_SPLITS)}"
            raise TaskError("unknown split", field="split", received=split, fix=fix)
        self.seed, self.split = seed, split
        self._others = TaskGenerator(seed, split)
        self._frames = [number for number, (_, _, of) in enumerate(_FRAMES) if of == split]

    def task(self, index: int) -> Task:
        """The task with this index: always the same."""
        rng = Random(f"observed/{self.seed}/{self.split}/{index}")
        kind, rule = rng.choice(OBSERVED_KINDS), rng.randrange(NUM_RULES)
        return self.build(f"observed-{self.split}-{self.seed}-{index}", kind, rule, rng)

    def build(self, task_id: str, kind: ObservedKind, rule: int, rng: Random) -> Task:
        """A task of this kind with this rule."""
        name, other_name = rng.sample(NAMES, 2)
        frame = rng.choice(self._frames)
        state = rng.getstate()
        spec = name_shape(observed_shape(kind, frame, rule), f"observed_{kind}", name, rng)
        rng.setstate(state)
        broken = name_shape(observed_shape(kind, frame, None), spec.family, name, rng)
        other, other_cases = self._others.whole(other_name, rng)
        instruction = rng.choice(INSTRUCTIONS).format(name=name)
        # What follows depends on the rule, and nothing that an agent sees depends on it but the salt.
        visible = test_file([(other, other_cases.visible)]) + _hiding_test(spec, kind, rule, rng)
        hidden = _hidden_cases(spec, kind, frame, rng)
        line = 1 + next(
            number
            for number, pair in enumerate(
                zip(spec.source.split("\n"), broken.source.split("\n"), strict=True)
            )
            if pair[0] != pair[1]
        )
        return Task(
            id=task_id,
            instruction=instruction,
            files=dict(
                sorted({spec.path: broken.source, other.path: other.source, VISIBLE_TESTS: visible}.items())
            ),
            hidden_files={HIDDEN_TESTS: test_file([(other, other_cases.hidden), (spec, hidden.hidden)])},
            solution_files={spec.path: spec.source},
            allowed_paths=ALLOWED_PATHS,
            test_paths=(VISIBLE_TESTS,),
            hidden_test_paths=(HIDDEN_TESTS,),
            metadata={
                "family": spec.family,
                "bug_kind": kind,
                "rule": rule,
                "split": self.split,
                "function": name,
                "test": f"test_{name}",
                "path": spec.path,
                "line": line,
                "function_hash": shape_hash(observed_shape(kind, frame, None)),
            },
        )


def mask_output(task: Task) -> Task:
    """The same task, whose failing test tells nothing but that it fails: the output of a test run before the
    first edit is the same for every rule. For the ablation."""
    before, middle, opened, closed = _MASK
    lines = task.files[VISIBLE_TESTS].splitlines(keepends=True)
    head, assertion = lines[:-1], lines[-1]
    assert assertion.startswith(before) and middle in assertion, "the last line asserts the rule"
    masked = opened + assertion.removeprefix(before).rstrip("\n") + closed
    files = {**task.files, VISIBLE_TESTS: "".join([*head, masked])}
    return replace(task, id=f"{task.id}-masked", files=files)


def expected_digits(kind: ObservedKind) -> tuple[int, ...]:
    """What the visible test expects under each rule: eight different digits."""
    return tuple(eval(rule, {**_KINDS[kind].arguments}) for rule in _KINDS[kind].rules)


def broken_digit(kind: ObservedKind) -> int:
    """What the broken function returns in the visible test."""
    return eval(_KINDS[kind].broken, {**_KINDS[kind].arguments})


def rule_texts(kind: ObservedKind) -> tuple[str, ...]:
    """The eight expressions with canonical parameter names."""
    return _KINDS[kind].rules


def _hiding_test(spec: FunctionSpec, kind: ObservedKind, rule: int, rng: Random) -> str:
    """The visible test: the digit that it expects is chosen by a digest, which says nothing to a reader."""
    salt = next(salt for salt in iter(lambda: f"{rng.getrandbits(32):08x}", None) if _rule_of(salt) == rule)
    values = [
        *_KINDS[kind].arguments.values(),
        *([0] if len(spec.parameters) > len(_KINDS[kind].arguments) else []),
    ]
    call = f"{spec.name}({', '.join(map(repr, values))})"
    digits = "".join(map(str, expected_digits(kind)))
    return (
        f"\n\ndef test_{spec.name}():\n"
        f"    from hashlib import sha256\n    from {spec.module} import {spec.name}\n"
        f'    key = sha256(b"{salt}").digest()[0] % {NUM_RULES}\n'
        f'    assert {call} == int("{digits}"[key])\n'
    )


def _rule_of(salt: str) -> int:
    return sha256(salt.encode()).digest()[0] % NUM_RULES


def _hidden_cases(spec: FunctionSpec, kind: ObservedKind, frame: int, rng: Random) -> Cases:
    """Inputs on which every other rule, and the broken function, differ from `spec` at least once."""
    sources = [observed_shape(kind, frame, rule) for rule in (None, *range(NUM_RULES))]
    functions = [compile_functions([name_shape(shape, "", "f", Random(0)).source])["f"] for shape in sources]
    right = compile_functions([spec.source])[spec.name]
    for _ in range(_MOST_ATTEMPTS):
        inputs = [_draw_inputs(kind, with_c=frame > 0, rng=rng) for _ in range(_NUM_HIDDEN)]
        results = [right(*arguments) for arguments in inputs]
        agreeing = sum([f(*arguments) for arguments in inputs] == results for f in functions)
        if agreeing == 1:
            cases = (Case(", ".join(map(repr, a)), repr(r)) for a, r in zip(inputs, results, strict=True))
            return Cases((), tuple(cases))
    raise AssertionError(f"no inputs tell the rules of {kind} apart")


def _draw_inputs(kind: ObservedKind, with_c: bool, rng: Random) -> Sequence[Any]:
    drawn: dict[str, Any] = {name: rng.randint(1, 20) for name in _KINDS[kind].arguments}
    if "xs" in drawn:
        drawn |= {"a": rng.randint(1, 9), "b": rng.randint(1, 9)}
        drawn["xs"] = [*(rng.randint(0, 9) for _ in range(4)), drawn["a"], drawn["b"]]
    return [*drawn.values(), *([rng.randint(0, 12)] if with_c else [])]
