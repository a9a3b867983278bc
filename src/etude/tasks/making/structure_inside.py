"""Whether a smell is gone from a project's modules, by their text alone.

Runs in a fresh sandbox beside a task's `test.sh`, before anything that the agent left behind does; standard
library only. A smell has the code of the rule by which ruff finds it, and is looked for as ruff does it,
whatever settings and `# noqa` say.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

LOGS = "/logs/verifier"
NAME = "structure"
"""Of the check among the outcomes of tests."""
JUMPS = {ast.Return: "RET505", ast.Raise: "RET506", ast.Continue: "RET507", ast.Break: "RET508"}
NO_MODULE = b"\0"
_RUNS_TEXT = re.compile(
    r"exec|eval|__import__|import_module|importlib|_*builtins(__)?|runpy|marshal|ctypes|codeop|FunctionType"
    r"|CodeType|__code__|__loader__"
)


@lru_cache(256)
def survey(data: bytes) -> tuple[Counter[tuple[str, str]], set[str]]:
    """What a module has: smells and what could hide one, by code and innermost function or class; and the
    qualified names of its functions and classes. The bytes are decoded as Python does it."""
    smells: Counter[tuple[str, str]] = Counter()
    defined: set[str] = set()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            todo: list[tuple[ast.AST, str]] = [(ast.parse(data), "")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Counter({("modules that cannot be read", ""): 1}), defined
    while todo:
        node, scope = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = f"{scope}.{node.name}".lstrip(".")
            defined.add(scope)
        names = [getattr(node, key, None) for key in ("id", "attr", "name", "module", "value")]
        words = [word for name in names if isinstance(name, str) for word in name.split(".")]
        is_compile = isinstance(node, ast.Name) and node.id == "compile"
        if is_compile or any(map(_RUNS_TEXT.fullmatch, words)):
            smells["ways to run text as code", scope] += 1
        smells.update((code, scope) for code in _find_smells(node))
        todo += [(child, scope) for child in ast.iter_child_nodes(node)]
    return smells, defined


def _find_smells(node: ast.AST) -> Iterator[str]:
    """The codes of the smells among the statements of a node's blocks."""
    for name in ("body", "orelse", "finalbody"):
        block = _block(getattr(node, name, None))
        for statement, following in zip_longest(block, block[1:]):
            if isinstance(statement, ast.If):
                is_elif = name == "orelse" and isinstance(node, ast.If) and _is_elif(node, statement)
                yield from _find_smells_of_if(statement, is_elif)
            elif isinstance(statement, ast.Assign) and isinstance(following, ast.Return):
                target, value = statement.targets[-1], following.value
                if isinstance(target, ast.Name) and isinstance(value, ast.Name) and target.id == value.id:
                    yield "RET504"


def _find_smells_of_if(statement: ast.If, is_elif: bool) -> Iterator[str]:
    body, orelse = _block(statement.body), _block(statement.orelse)
    if orelse and not is_elif and (code := JUMPS.get(type(body[-1]))):
        yield code
    if not orelse and len(body) == 1 and isinstance(body[0], ast.If) and not body[0].orelse:
        yield "SIM102"
    if len(orelse) == 1 and isinstance(orelse[0], ast.If) and not _is_elif(statement, orelse[0]):
        yield "PLR5501"


def _block(statements: Any) -> list[ast.stmt]:
    """The statements that do something, else all: one that does nothing hides no smell."""
    if not isinstance(statements, list):
        return []
    return [one for one in statements if not _is_idle(one)] or statements


def _is_idle(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Pass)


def _is_elif(node: ast.If, statement: ast.If) -> bool:
    return statement.col_offset == node.col_offset


def count_smells(modules: Mapping[str, bytes]) -> Counter[str]:
    """How many there are in all modules, by code."""
    counts: Counter[str] = Counter()
    for data in modules.values():
        for (code, _), count in survey(data)[0].items():
            counts[code] += count
    return counts


def find_fault(request: Mapping[str, Any], modules: Mapping[str, bytes]) -> str | None:
    """Why modules, by path, are not what `request` asks for; None if they are.

    Its `kept` are the functions and classes that must be there, by path; `clean` is a code, a path and a
    function without that smell; `limits` the most there may be of each smell in all modules.
    """
    for path, names in request["kept"].items():
        if missing := set(names) - survey(modules.get(path, b""))[1]:
            return f"{path} lacks {min(missing)}"
    code, path, scope = request["clean"]
    if survey(modules[path])[0][code, scope]:
        return f"{path} still has {code} in {scope}"
    for what, count in count_smells(modules).items():
        if count > request["limits"].get(what, 0):
            return f"{what}: {count}, which is more than before"
    return None


def read_modules(patterns: Sequence[str]) -> dict[str, bytes]:
    """The files of the working directory below `FOLDER/**`, or at a path; of what is no module nothing that
    can be read, so that another one counts."""
    found: dict[str, bytes] = {}
    for pattern in patterns:
        folder = Path(re.sub(r"/\*\*$", "", pattern))
        for path in [folder, *folder.rglob("*")]:
            if path.is_file():
                found[path.as_posix()] = path.read_bytes() if path.suffix == ".py" else NO_MODULE
    return found


def grade(path: str) -> None:
    """Writes whether the modules are what the file asks for; ends with 1 if they are not."""
    request = json.loads(Path(path).read_text())
    fault = find_fault(request, read_modules(request["patterns"]))
    Path(LOGS, "outcomes.json").write_text(json.dumps({NAME: "failed" if fault else "passed"}))
    Path(LOGS, "reward.txt").write_text("0\n")
    sys.exit(fault)


if __name__ == "__main__":
    grade(sys.argv[1])
