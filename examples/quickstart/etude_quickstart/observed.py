"""Observed: tasks whose right fix only a test run reveals.

The first line of a function is wrong. The right one is one of eight rules of its kind: a constant, a
comparison or an operator. The docstring does not mention it, and the visible test has it only as a SHA-256
digest, so that all eight are equally likely given the instruction and every file. The test runner prints the
value that the test expected, one digit, which is different for each rule of a kind:

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
from etude_quickstart.cases import Case, test_file
from etude_quickstart.families import Shape
from etude_quickstart.functions import DIRECTORIES, NAMES, FunctionSpec, compile_functions, shape_hash
from etude_quickstart.generator import (
    ALLOWED_PATHS,
    FUNCTION_SPLITS,
    HIDDEN_TESTS,
    INSTRUCTIONS,
    VISIBLE_TESTS,
    FunctionSplit,
    TaskGenerator,
)

ObservedKind = Literal["constant", "comparison", "operator"]
OBSERVED_KINDS: tuple[ObservedKind, ...] = get_args(ObservedKind)

NUM_RULES = 8
CEILING = 1 / NUM_RULES
"""Upper bound of the share of right first edits without a test run."""
_NUM_HIDDEN = 16
_MOST_ATTEMPTS = 1000
_SPLIT_OF_DIGIT: dict[int, FunctionSplit] = {4: "validation", 6: "heldout", 9: "heldout"}
"""Constant -> the only split of functions with it, whatever their rule."""
RULE_LINE = 3
"""Line number of the rule in its file."""
_MASK = ("    assert ", " == ", "    assert (", ") is True\n")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Eight lines, a ninth for the broken file, and the call that distinguishes them."""

    broken: str
    rules: tuple[str, ...]
    arguments: dict[str, Any]
    """Arguments in the visible test, except the last parameter `c`, which is 0."""


_KINDS: dict[ObservedKind, _Kind] = {
    "constant": _Kind("k = 0", tuple(f"k = {number}" for number in range(1, 9)), {}),
    "comparison": _Kind(
        "k = sum(x == a for x in xs)",
        tuple(
            f"k = sum(x {symbol} {bound} for x in xs)"
            for bound in ("a", "b")
            for symbol in ("<", "<=", ">", ">=")
        ),
        {"xs": [1, 3, 3, 3, 3, 5, 7, 7], "a": 3, "b": 7},
    ),
    "operator": _Kind(
        "k = (a << b) % 10",
        tuple(f"k = (a {symbol} b) % 10" for symbol in ("+", "-", "*", "//", "%", "&", "|", "^")),
        {"a": 6, "b": 13},
    ),
}


def _frames() -> tuple[tuple[str, tuple[str, ...], FunctionSplit], ...]:
    """(docstring words, lines, split) of the code after the rule; all return k if c is 0."""
    found: list[tuple[str, tuple[str, ...], FunctionSplit]] = []
    for digit in range(2, 10):
        split = _SPLIT_OF_DIGIT.get(digit, "train")
        found += [
            (f"return c times {digit} plus k", (f"return c * {digit} + k",), split),
            (f"return k minus c times {digit}", (f"return k - c * {digit}",), split),
            (
                f"if c above {digit}, return c, else return k",
                (f"if c > {digit}:", "    return c", "return k"),
                split,
            ),
        ]
    return tuple(found)


_FRAMES = _frames()


def observed_function(
    kind: ObservedKind, frame: int, rule: int | None, name: str, directory: str
) -> FunctionSpec:
    """The function with this rule; None: the broken one. The rule is the first line of the body."""
    words, lines, _ = _FRAMES[frame]
    first = _KINDS[kind].broken if rule is None else _KINDS[kind].rules[rule]
    signature = (*_KINDS[kind].arguments, "c")
    shape = Shape(signature, f"Set k to what the test says, {words}.", (first, *lines), "number")
    return FunctionSpec(
        name=name,
        family=f"observed_{kind}",
        directory=directory,
        signature=signature,
        kinds=(),
        docstring=shape.docstring,
        lines=shape.lines,
        returns="number",
        hash=shape_hash(shape),
    )


def frames_of(split: FunctionSplit) -> list[int]:
    """Indices of the frames (code after the rule) in functions of the split."""
    return [number for number, (_, _, of) in enumerate(_FRAMES) if of == split]


class ObservedGenerator:
    """Tasks by index, each a pure function of (seed, split, index). Raises TaskError for an unknown split.

    Functions of one split are never in another; their rule is drawn anew for each task.
    """

    def __init__(self, seed: int, split: FunctionSplit = "train") -> None:
        if split not in FUNCTION_SPLITS:
            fix = f"one of {', '.join(FUNCTION_SPLITS)}"
            raise TaskError("unknown split", field="split", received=split, fix=fix)
        self.seed = seed
        self.split: FunctionSplit = split
        self._others = TaskGenerator(seed, split)
        self._frames = frames_of(split)

    def task(self, index: int) -> Task:
        """The task with this index; deterministic."""
        rng = Random(f"observed/{self.seed}/{self.split}/{index}")
        kind, rule = rng.choice(OBSERVED_KINDS), rng.randrange(NUM_RULES)
        return self.build(f"observed-{self.split}-{self.seed}-{index}", kind, rule, rng)

    def build(self, task_id: str, kind: ObservedKind, rule: int, rng: Random) -> Task:
        """A task of this kind with this rule."""
        name, other_name = rng.sample(NAMES, 2)
        drawn = kind, rng.choice(self._frames)
        directory = rng.choice(DIRECTORIES)
        spec, broken = (observed_function(*drawn, which, name, directory) for which in (rule, None))
        other, other_cases = self._others.whole(other_name, rng)
        instruction = rng.choice(INSTRUCTIONS).format(name=name)
        # From here on draws depend on the rule; of what an agent sees, only the salt does.
        visible = test_file([(other, other_cases.visible)]) + _hiding_test(spec, kind, rule, rng)
        hidden = _hidden_cases(spec, *drawn, rng)
        return Task(
            id=task_id,
            instruction=instruction,
            files=dict(
                sorted({spec.path: broken.source, other.path: other.source, VISIBLE_TESTS: visible}.items())
            ),
            hidden_files={HIDDEN_TESTS: test_file([(other, other_cases.hidden), (spec, hidden)])},
            solution_files={spec.path: spec.source},
            allowed_paths=ALLOWED_PATHS,
            test_paths=(VISIBLE_TESTS,),
            hidden_test_paths=(HIDDEN_TESTS,),
            metadata={
                "family": f"{spec.family}_{rule}",
                "bug_kind": kind,
                "rule": rule,
                "split": self.split,
                "function": name,
                "test": f"test_{name}",
                "path": spec.path,
                "line": RULE_LINE,
                "function_hash": broken.hash,
            },
        )


def mask_output(task: Task) -> Task:
    """The task with a test that reveals nothing but its failure: the output of a test run before the first
    edit is the same for every rule. For the ablation."""
    before, middle, opened, closed = _MASK
    lines = task.files[VISIBLE_TESTS].splitlines(keepends=True)
    head, assertion = lines[:-1], lines[-1]
    assert assertion.startswith(before) and middle in assertion, "the last line asserts the rule"
    masked = opened + assertion.removeprefix(before).rstrip("\n") + closed
    files = {**task.files, VISIBLE_TESTS: "".join([*head, masked])}
    return replace(task, id=f"{task.id}-masked", files=files)


def expected_digits(kind: ObservedKind) -> tuple[int, ...]:
    """Value expected by the visible test under each rule: eight different digits."""
    return tuple(_value(kind, rule) for rule in _KINDS[kind].rules)


def broken_digit(kind: ObservedKind) -> int:
    """Value returned by the broken function in the visible test."""
    return _value(kind, _KINDS[kind].broken)


def _value(kind: ObservedKind, line: str) -> int:
    return eval(line.removeprefix("k = "), {**_KINDS[kind].arguments})


def _hiding_test(spec: FunctionSpec, kind: ObservedKind, rule: int, rng: Random) -> str:
    """The visible test: its expected digit is selected by a digest, which reveals nothing to a reader."""
    salts = iter(lambda: f"{rng.getrandbits(32):08x}", None)
    salt = next(salt for salt in salts if sha256(salt.encode()).digest()[0] % NUM_RULES == rule)
    call = f"{spec.name}({', '.join(map(repr, (*_KINDS[kind].arguments.values(), 0)))})"
    digits = "".join(map(str, expected_digits(kind)))
    return (
        f"\n\ndef test_{spec.name}():\n"
        f"    from hashlib import sha256\n    from {spec.module} import {spec.name}\n"
        f'    key = sha256(b"{salt}").digest()[0] % {NUM_RULES}\n'
        f'    assert {call} == int("{digits}"[key])\n'
    )


def _hidden_cases(spec: FunctionSpec, kind: ObservedKind, frame: int, rng: Random) -> tuple[Case, ...]:
    """Inputs on which every other rule, and the broken function, differ from `spec` at least once."""
    specs = [observed_function(kind, frame, rule, "f", "lib") for rule in (None, *range(NUM_RULES))]
    functions = [compile_functions([one.source])["f"] for one in specs]
    right = compile_functions([spec.source])[spec.name]
    for _ in range(_MOST_ATTEMPTS):
        inputs = [_draw_inputs(kind, rng) for _ in range(_NUM_HIDDEN)]
        results = [right(*arguments) for arguments in inputs]
        if sum([f(*arguments) for arguments in inputs] == results for f in functions) == 1:
            pairs = zip(inputs, results, strict=True)
            return tuple(Case(", ".join(map(repr, arguments)), repr(result)) for arguments, result in pairs)
    raise AssertionError(f"no inputs tell the rules of {kind} apart")


def _draw_inputs(kind: ObservedKind, rng: Random) -> Sequence[Any]:
    drawn: dict[str, Any] = {name: rng.randint(1, 20) for name in _KINDS[kind].arguments}
    if "xs" in drawn:
        drawn |= {"a": rng.randint(1, 9), "b": rng.randint(1, 9)}
        drawn["xs"] = [*(rng.randint(0, 9) for _ in range(4)), drawn["a"], drawn["b"]]
    return [*drawn.values(), rng.randint(0, 12)]
