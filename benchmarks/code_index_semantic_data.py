"""A labelled set for code search, made from the docstrings of installed packages.

The question is the first paragraph of a function's docstring; the answer is that function. All functions lose
their docstrings, also those that are not the answer to a question: otherwise answers would be the ones
without.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    *("torch", "transformers", "sympy", "networkx", "numpy", "matplotlib", "pydantic", "huggingface_hub"),
    *("hypothesis", "rich", "fastapi", "fsspec", "PIL"),
    *("json", "asyncio", "email", "http", "logging", "unittest", "xml", "concurrent", "importlib"),
)
"""Étude's dependencies, and the standard library's packages (not its single modules)."""
MIN_WORDS = 5
MAX_FILE_BYTES = 200_000


@dataclass(frozen=True, slots=True)
class Question:
    """A docstring's first paragraph, and the position of its function in the stripped file."""

    text: str
    path: str
    first_line: int
    last_line: int
    symbol: str
    development: bool
    """Whether it is in the development half, on which choices are made. Halves are split by file."""


@dataclass(frozen=True, slots=True)
class LabelledSet:
    """Stripped files by path, and questions about them."""

    files: dict[str, bytes]
    questions: tuple[Question, ...]
    num_functions: int


def make_set(num_functions: int, num_questions: int, seed: int) -> LabelledSet:
    """Takes files of all packages in turn, in a seeded order, until there are enough functions."""
    rng = random.Random(seed)
    queues = [files for package in PACKAGES if (files := _sources(package))]
    for files in queues:
        rng.shuffle(files)
    stripped: dict[str, bytes] = {}
    found: list[Question] = []
    count = 0
    while count < num_functions and any(queues):
        for files in [files for files in queues if files]:
            name, source = files.pop()
            result = _strip(name, source, rng.random() < 0.5)
            if result is None:
                continue
            stripped[name], questions, functions = result
            found += questions
            count += functions
    again = Counter(question.text for question in found)
    unique = [question for question in found if again[question.text] == 1]
    kept = rng.sample(unique, min(num_questions, len(unique)))
    return LabelledSet(stripped, tuple(kept), count)


def _sources(package: str) -> list[tuple[str, str]]:
    """(path, text) of a package's files, without tests."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    files: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root.parent)
        if any(part.startswith("test") or part == "_vendor" for part in inside.parts[:-1]):
            continue
        if path.name.startswith("test_") or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            files.append((inside.as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return files


def _strip(path: str, source: str, development: bool) -> tuple[bytes, list[Question], int] | None:
    """A file without its functions' docstrings, its questions and the number of its functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    lines = source.split("\n")
    docs: dict[str, str] = {}
    names = Counter(name for name, _ in _functions(tree))
    for name, function in _functions(tree):
        first = function.body[0]
        doc = ast.get_docstring(function)
        if doc is None or not isinstance(first, ast.Expr):
            continue
        if first.lineno <= function.lineno or lines[first.lineno - 1][: first.col_offset].strip():
            continue
        if lines[(first.end_lineno or 0) - 1][first.end_col_offset or 0 :].strip(" \t;"):
            continue
        indent = lines[first.lineno - 1][: first.col_offset]
        for row in range(first.lineno - 1, first.end_lineno or 0):
            lines[row] = "\0"
        if len(function.body) == 1:
            lines[first.lineno - 1] = indent + "pass"
        if names[name] == 1:
            docs[name] = doc
    text = "\n".join(line for line in lines if line != "\0")
    try:
        left = dict(_functions(ast.parse(text)))
    except SyntaxError:
        return None
    asked = [
        Question(question, path, left[name].lineno, left[name].end_lineno or 0, name, development)
        for name, doc in docs.items()
        if (question := _first_paragraph(doc))
    ]
    return text.encode(), asked, len(left)


def _functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods by qualified name; those within functions count as part of them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _functions(node, prefix)


def _first_paragraph(doc: str) -> str:
    """The first paragraph on one line; "" if it is too short for a question."""
    text = " ".join(re.split(r"\n\s*\n", doc.strip())[0].split())
    return text if len(text.split()) >= MIN_WORDS else ""
