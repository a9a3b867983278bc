"""Whether a refactoring is done, by the text of a project's modules alone.

Runs in a fresh sandbox beside a task's `test.sh`, before anything that the agent left behind does; standard
library only. A smell has the code of the rule by which ruff finds it and is looked for as ruff does, but
no settings count, and no `# noqa`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

LOGS = "/logs/verifier"
NAME = "structure"
"""Of the check among the outcomes of tests."""
JUMPS = {ast.Return: "RET505", ast.Raise: "RET506", ast.Continue: "RET507", ast.Break: "RET508"}
_DYNAMIC = re.compile(
    r"exec|eval|__import__|import_module|_*builtins(__)?|importlib|runpy|marshal|ctypes|codeop|FunctionType"
    r"|CodeType|__code__|__loader__|spec_from_\w+"
)
"""Names by which code could run that no syntax tree shows."""
_SILENCED = re.compile(r"#.*\b(noqa|(ruff|flake8|pylint):)", re.IGNORECASE)
_CODING = re.compile(r"^[ \t\f]*#.*?coding[:=]")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Survey:
    """What is counted in a module."""

    smells: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By code and qualified name of the innermost function or class."""
    defined: set[str] = field(default_factory=set[str])
    """Qualified names of functions and classes, and of what a module or class assigns."""
    words: Counter[str] = field(default_factory=Counter[str])
    """Identifiers."""
    hiding: Counter[str] = field(default_factory=Counter[str])
    """Things that could hide a smell."""

    def counts(self) -> Counter[str]:
        """How many of each smell there are, and of each thing that could hide one."""
        smells: Counter[str] = Counter()
        for (code, _), count in self.smells.items():
            smells[code] += count
        return smells + self.hiding


@lru_cache(256)
def survey(text: str | None) -> Survey:
    """Looks through a module; None stands for one that is no text."""
    found = Survey()
    try:
        tree = ast.parse(text or "")
        if text is None:
            raise ValueError
        for node, scope, function in _walk(tree):
            _look_at(node, scope, function, found)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Survey(hiding=Counter({"modules that cannot be read": 1}))
    found.hiding["suppressed findings"] = len(_SILENCED.findall(text))
    found.hiding["declared encodings"] = sum(map(bool, map(_CODING.match, text.split("\n")[:2])))
    dynamic = sum(count for word, count in found.words.items() if _DYNAMIC.fullmatch(word))
    found.hiding["ways to run text as code"] += dynamic
    return found


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, str, bool]]:
    """Each node with the function or class that it stands in or is, and whether it is in a function."""
    todo: list[tuple[ast.AST, str, bool]] = [(tree, "", False)]
    while todo:
        node, scope, is_inside = todo.pop()
        if isinstance(node, (*_Function, ast.ClassDef)):
            scope, is_inside = f"{scope}.{node.name}".lstrip("."), isinstance(node, _Function)
        yield node, scope, is_inside
        todo += [(child, scope, is_inside) for child in ast.iter_child_nodes(node)]


def _look_at(node: ast.AST, scope: str, is_inside: bool, found: Survey) -> None:
    names = [getattr(node, field, None) for field in ("id", "attr", "name", "asname", "module", "arg")]
    found.words.update(word for name in names if isinstance(name, str) for word in name.split("."))
    found.hiding["ways to run text as code"] += isinstance(node, ast.Name) and node.id == "compile"
    if isinstance(node, (*_Function, ast.ClassDef)):
        found.defined.add(scope)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and not is_inside:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        found.defined.update(f"{scope}.{one.id}".lstrip(".") for one in targets if isinstance(one, ast.Name))
    for name in ("body", "orelse", "finalbody"):
        block = _block(getattr(node, name, []))
        for at, statement in enumerate(block):
            is_elif = name == "orelse" and isinstance(node, ast.If) and _is_elif(node, statement)
            codes = _smells_of(statement, block[at + 1 : at + 2], is_elif)
            found.smells.update((code, scope) for code in codes)


def _block(statements: Any) -> list[ast.stmt]:
    """The statements that do something; all where none does, and none for an expression's part."""
    if not isinstance(statements, list):
        return []
    return [one for one in statements if not _is_idle(one)] or statements


def _is_idle(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _is_elif(node: ast.If, statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and statement.col_offset == node.col_offset


def _smells_of(statement: ast.stmt, following: Sequence[ast.stmt], is_elif: bool) -> Iterator[str]:
    """The codes of the smells that a statement has, or it and the next one."""
    match statement, following:
        case ast.Assign([ast.Name(id=name)]), [ast.Return(ast.Name(id=returned))] if returned == name:
            yield "RET504"
        case ast.If(), _:
            body, orelse = _block(statement.body), _block(statement.orelse)
            if orelse and not is_elif and type(body[-1]) in JUMPS:
                yield JUMPS[type(body[-1])]
            if not orelse and len(body) == 1 and isinstance(body[0], ast.If) and not body[0].orelse:
                yield "SIM102"
            if len(orelse) == 1 and isinstance(inner := orelse[0], ast.If):
                if not _is_elif(statement, inner):
                    yield "PLR5501"
                elif list(map(ast.dump, body)) == list(map(ast.dump, _block(inner.body))):
                    yield "SIM114"
            if {_truth(body), _truth(orelse or following)} == {True, False}:
                yield "SIM103"
        case _:
            pass


def _truth(block: Sequence[ast.stmt]) -> bool | None:
    """What a block of one `return True` or `return False` gives."""
    match block:
        case [ast.Return(ast.Constant(bool() as value))]:
            return value
        case _:
            return None


def find_fault(request: Mapping[str, Any], texts: Mapping[str, str | None]) -> str | None:
    """Why modules are not what `request` asks for; None if they are. A text is None for what is no UTF-8.

    Its `kept` are names that modules must have, by path; `clean` is a code, a path and a scope without this
    smell; `gone` a name that stands nowhere, `used` one that is used; `limits` the most of what is counted.
    """
    found = {path: survey(text) for path, text in texts.items()}
    for path, names in request["kept"].items():
        if missing := set(names) - (found[path].defined if path in found else set()):
            return f"{path} lacks {min(missing)}"
    for code, path, scope in request["clean"]:
        if (code, scope) in found[path].smells:
            return f"{path} still has {code} in {scope}"
    for gone in request["gone"]:
        if any(re.search(rf"\b{gone}\b", text or "") for text in texts.values()):
            return f"{gone} is still there"
    for used in request["used"]:
        if sum(one.words[used] for one in found.values()) < 2:
            return f"{used} is not used"
    counts = sum((one.counts() for one in found.values()), Counter[str]())
    more = [name for name, count in counts.items() if count > request["limits"].get(name, 0)]
    return f"{min(more)}: {counts[min(more)]}, which is more than before" if more else None


def read_modules(patterns: Sequence[str]) -> dict[str, str | None]:
    """The modules of the working directory below `FOLDER/**`, or at a path."""
    found: dict[str, str | None] = {}
    for pattern in patterns:
        folder = Path(pattern.removesuffix("/**"))
        for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if path.is_file() and path.suffix in (".py", ".so", ".pyd"):
                try:
                    found[path.as_posix()] = path.read_bytes().decode()
                except UnicodeDecodeError:
                    found[path.as_posix()] = None
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
