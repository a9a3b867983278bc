"""Mutation operators on statements: branches, loops, assignments, decorators, exceptions, classes."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from etude.tasks.making.expressions import Planted
from etude.tasks.making.source import Edit, Function, Scope, Source, blocks, has_docstring

_OTHER_EXCEPTION = {
    "ValueError": "TypeError",
    "TypeError": "ValueError",
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "AttributeError": "TypeError",
    "RuntimeError": "ValueError",
    "NotImplementedError": "RuntimeError",
    "OSError": "RuntimeError",
    "FileNotFoundError": "PermissionError",
    "StopIteration": "ValueError",
    "ImportError": "RuntimeError",
    "ZeroDivisionError": "ValueError",
    "OverflowError": "TypeError",
    "LookupError": "ValueError",
    "UnicodeDecodeError": "UnicodeEncodeError",
    "UnicodeEncodeError": "UnicodeDecodeError",
}


def remove_statement(source: Source, node: ast.AST) -> Planted:
    """An assignment to a target that already has a value, or a call for its side effect, is removed."""
    in_class = isinstance(node, ast.ClassDef | ast.Module)
    for block in blocks(node):
        for statement in block:
            if isinstance(statement, ast.AugAssign):
                yield "removed assignment", [source.remove(statement, block)]
            elif isinstance(statement, ast.Assign) and not in_class:
                if all(_has_value(source, target, statement) for target in statement.targets):
                    yield "removed assignment", [source.remove(statement, block)]
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await):
                yield "removed call", [source.remove(statement, block)]
            elif isinstance(statement, ast.Delete | ast.Continue):
                yield "removed statement", [source.remove(statement, block)]


def _has_value(source: Source, target: ast.expr, statement: ast.stmt) -> bool:
    """Whether the target probably has a value without this assignment: an attribute, item or earlier name."""
    if isinstance(target, ast.Attribute | ast.Subscript):
        return True
    scope = next((one for one in source.ancestors(statement) if isinstance(one, Function)), None)
    if not isinstance(target, ast.Name) or scope is None:
        return False
    names = [argument.arg for argument in [*scope.args.args, *scope.args.kwonlyargs]]
    names += [
        entry.id
        for entry in ast.walk(scope)
        if isinstance(entry, ast.Name)
        and isinstance(entry.ctx, ast.Store)
        and entry.lineno < statement.lineno
    ]
    return target.id in names


def remove_branch(source: Source, node: ast.AST) -> Planted:
    """An `if` with its body, its last `else`, or an exception handler is removed."""
    for block in blocks(node):
        for statement in block:
            if isinstance(statement, ast.If) and source.text.startswith("if", source.start(statement)):
                yield from _remove_if(source, statement, block)
            elif isinstance(statement, ast.Try) and len(statement.handlers) > 1:
                for handler in statement.handlers:
                    yield "removed handler", [source.remove_lines(handler, handler.body[-1])]


def _remove_if(source: Source, statement: ast.If, block: list[ast.stmt]) -> Planted:
    if not statement.orelse:
        leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
        yield "removed guard" if leaves else "removed branch", [source.remove(statement, block)]
        yield "unconditional branch", [_dedent(source, statement, statement.body)]
        return
    branch = statement
    while len(branch.orelse) == 1 and isinstance(branch.orelse[0], ast.If):
        inner = branch.orelse[0]
        if not source.text.startswith("elif", source.start(inner)):
            break
        if not inner.orelse or source.text.startswith("elif", source.start(inner.orelse[0])):
            yield "removed branch", [source.remove_lines(inner, inner.body[-1])]
        branch = inner
    if branch.orelse:  # the `else:` is between the two blocks
        span = source.own_lines(branch.orelse[0], branch.orelse[-1])
        end = source.text.find("\n", source.end(branch.body[-1])) + 1
        if span is not None and re.search(r"^\s*else\s*:", source.text[end : span[0]], re.MULTILINE):
            yield "removed branch", [Edit(end, span[1], "")]
            first = source.own_lines(branch.body[0], branch.body[-1])
            if first is not None and first[1] <= span[0]:
                one, two = source.text[slice(*first)], source.text[slice(*span)]
                yield "swapped branches", [Edit(*first, two), Edit(*span, one)]


def _dedent(source: Source, statement: ast.stmt, body: list[ast.stmt]) -> Edit | None:
    """The edit that replaces a statement by its dedented body."""
    outer, inner = source.own_lines(statement, body[-1]), source.own_lines(body[0], body[-1])
    if outer is None or inner is None:
        return None
    text = source.text[slice(*inner)]
    drop = body[0].col_offset - statement.col_offset
    if '"""' in text or "'''" in text or not body[0].col_offset > statement.col_offset:
        return None
    return Edit(*outer, re.sub(rf"^[ \t]{{{drop}}}", "", text, flags=re.MULTILINE))


def remove_loop(source: Source, node: ast.AST) -> Planted:
    """A loop is removed, runs only once, or has `break` and `continue` exchanged."""
    for block in blocks(node):
        for statement in block:
            if isinstance(statement, ast.Continue):
                yield "changed jump", [source.replace(statement, "break")]
            elif isinstance(statement, ast.Break):
                yield "changed jump", [source.replace(statement, "continue")]
            if not isinstance(statement, ast.For | ast.While):
                continue
            yield "removed loop", [source.remove(statement, block)]
            jumps = any(isinstance(entry, ast.Break | ast.Continue) for entry in ast.walk(statement))
            if isinstance(statement, ast.While) and not jumps and not statement.orelse:
                at = source.start(statement)
                yield "loop runs once", [Edit(at, at + len("while"), "if")]
            last = statement.body[-1]
            if isinstance(statement, ast.For) and not isinstance(last, ast.Return | ast.Raise | ast.Break):
                span = source.own_lines(last, last)
                if span is not None and source.text[span[1] - 1 : span[1]] == "\n":
                    indent = source.lines[statement.body[0].lineno - 1][: statement.body[0].col_offset]
                    yield "loop runs once", [Edit(span[1], span[1], f"{indent}break\n")]


def change_return(source: Source, node: ast.AST) -> Planted:
    """A result is computed but not returned."""
    for block in blocks(node):
        for statement in block:
            if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call):
                yield "lost return", [source.replace(statement, source.segment(statement.value))]
            elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.BoolOp | ast.Compare):
                yield "lost return", [source.replace(statement.value, "None")]


def change_exception(source: Source, node: ast.AST) -> Planted:
    """Another type of exception is raised or caught, or one of several is no longer caught."""
    kinds: list[ast.expr] = []
    if isinstance(node, ast.Raise) and node.exc is not None:
        kinds = [node.exc.func if isinstance(node.exc, ast.Call) else node.exc]
    elif isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Tuple):
        kinds = node.type.elts
        if len(kinds) > 1:
            for keep in range(len(kinds)):
                others = [source.segment(kind) for at, kind in enumerate(kinds) if at != keep]
                yield "exception kind", [source.replace(node.type, f"({', '.join(others)},)")]
    elif isinstance(node, ast.ExceptHandler) and node.type is not None:
        kinds = [node.type]
    for kind in kinds:
        if isinstance(kind, ast.Name) and kind.id in _OTHER_EXCEPTION:
            yield "exception kind", [source.replace(kind, _OTHER_EXCEPTION[kind.id])]
        elif isinstance(kind, ast.Name) and kind.id[:1].isupper() and isinstance(node, ast.Raise):
            yield "exception kind", [source.replace(kind, "RuntimeError")]


def change_decorator(source: Source, node: ast.AST) -> Planted:
    """A decorator is removed."""
    if not isinstance(node, Scope):
        return
    for decorator in node.decorator_list:
        text = source.segment(decorator)
        if re.search(r"overload|abstract|deprecat|final|override|total_ordering\b.*\bno", text):
            continue
        first, last = decorator.lineno, decorator.end_lineno or decorator.lineno
        yield "removed wrapper", [Edit(source.starts[first - 1], source.starts[last], "")]


def share_mutable(source: Source, node: ast.AST) -> Planted:
    """A default of None that the body replaces by a new list or dict becomes that shared list or dict.

    Likewise an attribute that `__init__` sets becomes a class attribute.
    """
    if isinstance(node, Function):
        names = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        pairs = [*zip(names, node.args.defaults, strict=True)]
        keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        pairs += [(name, default) for name, default in keywords if default is not None]
        for name, default in pairs:
            for statement in node.body:
                new = _fresh_value(source, statement, name.arg)
                if new and isinstance(default, ast.Constant) and default.value is None:
                    removed = source.remove(statement, node.body)
                    yield "shared mutable", [source.replace(default, new), removed]
    elif isinstance(node, ast.ClassDef):
        functions = [entry for entry in node.body if isinstance(entry, Function)]
        init = next((one for one in functions if one.name == "__init__"), None)
        if init is not None:
            for statement in init.body:
                yield from _share_attribute(source, statement, functions[0], init)


def _fresh_value(source: Source, statement: ast.stmt, name: str) -> str:
    """`[]` where the statement is `if name is None: name = []`."""
    if not isinstance(statement, ast.If) or len(statement.body) != 1 or statement.orelse:
        return ""
    inner = statement.body[0]
    if source.segment(statement.test) not in (f"{name} is None", f"not {name}"):
        return ""
    if not isinstance(inner, ast.Assign) or source.segment(inner.targets[0]) != name:
        return ""
    value = source.segment(inner.value)
    return value if value in _FRESH else ""


_FRESH = ("[]", "{}", "set()", "dict()", "list()")


def _share_attribute(source: Source, statement: ast.stmt, start: Function, init: Function) -> Planted:
    target = value = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign):
        target, value = statement.target, statement.value
    if not isinstance(target, ast.Attribute) or source.segment(target.value) != "self" or value is None:
        return
    removed, at = source.remove(statement, init.body), source.start(start)
    if source.segment(value) in _FRESH and not target.attr.startswith("__"):
        text = f"{target.attr} = {source.segment(value)}\n\n{' ' * start.col_offset}"
        yield "shared mutable", [Edit(at, at, text), removed]


def change_class(source: Source, node: ast.AST) -> Planted:
    """A base class is removed or reordered, or an overriding method is removed."""
    if not isinstance(node, ast.ClassDef):
        return
    plain = [base for base in node.bases if isinstance(base, ast.Name | ast.Attribute)]
    for first, second in pairwise(plain):
        one, two = source.segment(first), source.segment(second)
        yield "base class", [source.replace(first, two), source.replace(second, one)]
        yield "base class", [Edit(source.end(first), source.end(second), "")]
    if len(plain) == len(node.bases) == 1 and not node.keywords:
        classes = [entry for entry in source.tree.body if isinstance(entry, ast.ClassDef)]
        parents = [c.bases[0] for c in classes if c.bases and c.name == source.segment(plain[0])]
        if parents and source.segment(parents[0]) != "object":
            yield "base class", [source.replace(plain[0], source.segment(parents[0]))]
    for entry in node.body if node.bases else []:
        special = isinstance(entry, Function) and entry.name.startswith("__") and entry.name != "__init__"
        if isinstance(entry, Function) and (special or "super()." in source.segment(entry)):
            yield "dropped method", [source.remove(entry, node.body)]


def change_default(source: Source, node: ast.AST) -> Planted:
    """A parameter's default is another value."""
    if not isinstance(node, Function):
        return
    for default in [*node.args.defaults, *node.args.kw_defaults]:
        if isinstance(default, ast.Constant) and isinstance(default.value, bool):
            yield "changed default", [source.replace(default, str(not default.value))]
        elif isinstance(default, ast.Constant) and isinstance(default.value, int):
            yield "changed default", [source.replace(default, str(default.value + 1))]


def reorder_statements(source: Source, node: ast.AST) -> Planted:
    """Two adjacent statements are swapped, if the second reads or writes what the first writes."""
    for block in blocks(node) if not isinstance(node, ast.Module | ast.ClassDef) else ():
        first_at = 1 if block is getattr(node, "body", None) and has_docstring(node) else 0
        for first, second in zip(block[first_at:], block[first_at + 1 :], strict=False):
            if not isinstance(first, ast.Assign | ast.AugAssign | ast.Expr | ast.If):
                continue
            if not isinstance(second, ast.Assign | ast.AugAssign | ast.Expr | ast.If | ast.For):
                continue
            one, two = source.own_lines(first, first), source.own_lines(second, second)
            if one is None or two is None or one[1] != two[0] or source.text[two[1] - 1] != "\n":
                continue
            if _written(first) & _names(second) and _reads_earlier(source, first, second):
                texts = source.text[slice(*one)], source.text[slice(*two)]
                yield "reordered statements", [Edit(one[0], two[1], texts[1] + texts[0])]


def _written(statement: ast.stmt) -> set[str]:
    return {
        ast.unparse(entry)
        for entry in ast.walk(statement)
        if isinstance(entry, ast.Name | ast.Attribute) and isinstance(entry.ctx, ast.Store)
    }


def _names(statement: ast.stmt) -> set[str]:
    return {
        ast.unparse(entry) for entry in ast.walk(statement) if isinstance(entry, ast.Name | ast.Attribute)
    }


def _reads_earlier(source: Source, first: ast.stmt, second: ast.stmt) -> bool:
    """Whether shared names have values before the first statement, so that a swap is no NameError."""
    shared = _written(first) & _names(second)
    return all("." in name or _has_value(source, ast.Name(name, ast.Store()), first) for name in shared)


STATEMENT_RULES = (
    remove_statement,
    remove_branch,
    remove_loop,
    change_return,
    change_exception,
    change_decorator,
    share_mutable,
    change_class,
    change_default,
    reorder_statements,
)
