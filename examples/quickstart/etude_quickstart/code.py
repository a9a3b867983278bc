"""Mid-training documents of plain code and fixes, from the train split."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from etude_quickstart.edits import body_start
from etude_quickstart.families import FAMILIES, draw_caller
from etude_quickstart.functions import NAMES, FunctionSpec, draw_function, name_shape, shape_hash
from etude_quickstart.generator import TaskGenerator, canonical_parameters, split_of_hash
from etude_quickstart.mutations import mutations

NUMBERED_SHARE = 0.5
"""Share of documents in the file tool's format: line number, tab, line."""
FIX_MARK = "\nfix "
"""Separates a broken file from the line that corrects it: its number, a tab, its text."""
REWRITE_MARK = "\nrewrite "
"""Separates a broken file from its function's correct body: the range of lines, then the body."""
_MAX_BUGS = 3
_CALLER_SHARE = 0.1


def code_documents(seed: int, count: int) -> Iterator[str]:
    """`count` files with one right function each, docstring first; the same for the same seed.

    Half are plain, half numbered. No function of another split is among them.
    """
    rng = Random(f"code/{seed}")
    for _ in range(count):
        source = _draw(rng).source
        if rng.random() < NUMBERED_SHARE:
            source = numbered(source)
        yield source


def fix_documents(seed: int, count: int, first: int = 0) -> Iterator[str]:
    """Like a commit history of fixes: a broken file, numbered, then the line that corrects it.

    Documents `first` .. `first + count - 1`, the same for the same seed. They have no tool calls: only
    sessions show how to make a fix with tools.
    """
    tasks = TaskGenerator(seed, "train")
    for index in range(first, first + count):
        task = tasks.task(index)
        path, line = str(task.metadata["path"]), int(task.metadata["line"])
        corrected = task.solution_files[path].split("\n")[line - 1]
        yield f"{numbered(task.files[path])}{FIX_MARK}{line}\t{corrected}"


def rewrite_documents(seed: int, count: int) -> Iterator[str]:
    """A file with one to three bugs, numbered, then the function's correct body.

    With several bugs, following the docstring is right more often than copying the code.
    """
    rng = Random(f"rewrite/{seed}")
    for _ in range(count):
        source, changes = "", dict[int, str]()
        while not changes:
            source = _draw(rng).source
            wrong = [(bug.line, bug.apply(source).split("\n")[bug.line - 1]) for bug in mutations(source)]
            changes = dict(rng.choice(wrong) for _ in range(rng.randint(1, _MAX_BUGS)) if wrong)
        lines = source.removesuffix("\n").split("\n")
        first = body_start(lines)
        broken = "\n".join(changes.get(number, line) for number, line in enumerate(lines, 1))
        body = "\n".join(lines[first - 1 :])
        yield f"{numbered(broken)}{REWRITE_MARK}{first}-{len(lines)}\n{body}"


def numbered(source: str) -> str:
    """The file in the file tool's format, with line numbers."""
    lines = source.removesuffix("\n").split("\n")
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1))


def _draw(rng: Random) -> FunctionSpec:
    """A function of the train split, or sometimes a caller of one."""
    name, other = rng.sample(NAMES, 2)
    while True:
        spec = draw_function(rng.choice(FAMILIES), name, rng)
        if split_of_hash(spec.hash) != "train":
            continue
        if rng.random() >= _CALLER_SHARE:
            return spec
        shape = draw_caller(rng, spec.returns, canonical_parameters(spec))
        if split_of_hash(shape_hash(shape)) == "train":
            return name_shape(shape, "caller", other, rng, imports=(spec,))
