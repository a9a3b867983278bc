"""Backward slicing of a test: the earlier statements on which the failed one depends, by static analysis.

Conservative: a call that could have changed a value that is used later is kept, whatever its name. Of an
assertion that passed only its calls are kept.
"""

from __future__ import annotations

import ast
import unittest
from collections.abc import Iterator, Sequence

from etude.tasks.making.source import Function

_ONLY_LOOK = {
    f"self.{name}"
    for name in dir(unittest.TestCase)
    if name.startswith("assert") and not name.startswith(("assertRaises", "assertWarns", "assertLogs"))
}
"""Assertions of unittest that do not call their arguments."""
_MAYBE_RUN = (
    ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip
"""Expressions that bind names, or whose calls may not run exactly once: kept whole."""


def slice_before(block: Sequence[ast.stmt], piece: ast.AST, arguments: set[str]) -> list[ast.stmt]:
    """The statements of `block` on which a piece of the next statement depends. `arguments`: of the test."""
    own = arguments.union(*(_bound_here(node) for node in block))
    links = [names for node in block for names in _links(node, own)]
    kept: list[ast.stmt] = []
    needed = loaded_names(piece)
    for node in reversed(block):
        mine = _keep(node, needed, _reach(needed, links) - {"pytest"}, own)
        kept[:0] = mine
        needed = needed.union(*map(loaded_names, mine))
    return kept


def is_raises(statement: ast.stmt) -> bool:
    """Whether it is `with pytest.raises(...)` or the like."""
    return isinstance(statement, ast.With) and any(
        isinstance(item.context_expr, ast.Call)
        and ast.unparse(item.context_expr.func).rpartition(".")[2] in ("raises", "warns", "assertRaises")
        for item in statement.items
    )


def bound_names(node: ast.AST) -> set[str]:
    """Names that a statement binds, including nested statements."""
    found = set[str]()
    for entry in ast.walk(node):
        if isinstance(entry, ast.Name) and not isinstance(entry.ctx, ast.Load):
            found.add(entry.id)
        elif isinstance(entry, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in entry.names}
        elif isinstance(entry, Function | ast.ClassDef):
            found.add(entry.name)
    return found


def loaded_names(node: ast.AST) -> set[str]:
    """Names that a node uses and does not bind as a parameter or a caught exception."""
    inner = list(ast.walk(node))
    used = {entry.id for entry in inner if isinstance(entry, ast.Name) and isinstance(entry.ctx, ast.Load)}
    if isinstance(node, ast.AugAssign):
        used |= {entry.id for entry in ast.walk(node.target) if isinstance(entry, ast.Name)}
    own = {entry.arg for entry in inner if isinstance(entry, ast.arg)}
    return used - own - {entry.name for entry in inner if isinstance(entry, ast.ExceptHandler) and entry.name}


def _bound_here(node: ast.stmt) -> set[str]:
    """Names bound by a statement that may refer to mutable values: no imports, no constants."""
    is_constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    return set() if is_constant or isinstance(node, ast.Import | ast.ImportFrom) else bound_names(node)


def _links(node: ast.stmt, own: set[str]) -> Iterator[set[str]]:
    """Sets of names that may refer to the same object, or a part of it, after the statement."""
    if bound := _bound_here(node):
        yield (bound | loaded_names(node)) & own
    for call in _calls(node):
        yield loaded_names(call) & own


def _reach(names: set[str], links: Sequence[set[str]]) -> set[str]:
    """The transitive closure of `names` under `links`."""
    while more := set[str]().union(*(link for link in links if link & names)) - names:
        names = names | more
    return names


def _keep(node: ast.stmt, needed: set[str], reached: set[str], own: set[str]) -> list[ast.stmt]:
    """The part of a statement that must run: all of it, the calls of a passed assertion, or nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
        return [node] if bound_names(node) & needed else []
    looked_at = _looked_at(node)
    if looked_at is not None and not bound_names(node) & needed:
        calls = [call for one in looked_at for call in _run_calls(one) if _touches(call, reached, own)]
        return [ast.Expr(call) for call in calls]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {entry.id for target in targets for entry in ast.walk(target) if isinstance(entry, ast.Name)}
    elif looked_at is not None or is_raises(node) or ast.unparse(node).startswith("self.assert"):
        names = bound_names(node)
    else:
        return [node]
    return [node] if names & needed or _touches(node, reached, own) else []


def _looked_at(node: ast.stmt) -> Sequence[ast.expr] | None:
    """The expressions that a passing assertion evaluates; None for any other statement."""
    if isinstance(node, ast.Assert):
        return [node.test]
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) not in _ONLY_LOOK:
        return None
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _run_calls(expression: ast.AST) -> list[ast.expr]:
    """The outermost calls in order of execution; expressions that may skip some of theirs as a whole."""
    is_chain = isinstance(expression, ast.Compare) and len(expression.ops) > 1
    if isinstance(expression, ast.Call) or is_chain or isinstance(expression, _MAYBE_RUN):
        return [expression] if any(_calls(expression)) and isinstance(expression, ast.expr) else []
    return [call for child in ast.iter_child_nodes(expression) for call in _run_calls(child)]


def _touches(node: ast.AST, reached: set[str], own: set[str]) -> bool:
    """Whether a call in it has a reached name as receiver or argument, or as a local function of the test."""
    for call in _calls(node):
        given: list[ast.AST] = [*call.args, *call.keywords]
        given += [call.func.value] if isinstance(call.func, ast.Attribute) else []
        names = set[str]().union(*map(loaded_names, given))
        if names & reached or (isinstance(call.func, ast.Name) and call.func.id in reached & own):
            return True
    return False


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (entry for entry in ast.walk(node) if isinstance(entry, ast.Call))
