"""Converts a test method into a plain function: attributes of its class become local names.

    class attribute         ──> assignment      ┐
    helper method           ──> function        ├─ before the test's own statements
    setUp                   ──> its statements  ┘
    self.box, self._make()  ──> box, make()

Attributes that no class of the file defines are left unchanged.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from etude.tasks.making.source import Function

_SETUPS = ("setUp", "setup_method")


def flatten_method(tree: ast.Module, method: ast.FunctionDef) -> tuple[list[ast.stmt], ast.FunctionDef]:
    """(statements that run before a test function's own, the function with resolvable uses of `self`
    replaced). Line numbers are those of the file. A function outside of a class is returned unchanged."""
    owner = next(
        (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and method in one.body), None
    )
    if owner is None or not method.args.args:
        return [], method
    found = _Members(tree, owner)
    setup = found.setup
    taken = {node.id for one in (method, *setup) for node in ast.walk(one) if isinstance(node, ast.Name)}
    taken |= {entry for node in tree.body for entry in _defined(node)}
    flattening = _Flattening(found, method.args.args[0].arg, taken)
    first = [flattening.visit(copy.deepcopy(node)) for node in setup]
    needed, flattening.bindings = flattening.bindings, []
    flat = flattening.visit(copy.deepcopy(method))
    return [*needed, *first, *flattening.bindings], flat


class _Members:
    """The attributes and methods of a class, from its body and its bases in the file."""

    def __init__(self, tree: ast.Module, owner: ast.ClassDef) -> None:
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.values: dict[str, ast.expr] = {}
        self.methods: dict[str, ast.FunctionDef] = {}
        for one in reversed(list(_with_bases(owner, classes))):
            for node in one.body:
                if isinstance(node, ast.FunctionDef):
                    self.methods[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.values[node.targets[0].id] = node.value

    @property
    def setup(self) -> list[ast.stmt]:
        """Statements that run before each test, without those of bases in other files."""
        bodies = (self.methods[name].body for name in _SETUPS if name in self.methods)
        return [node for body in bodies for node in body if "super()" not in ast.unparse(node)]

    @property
    def set_up(self) -> set[str]:
        """Attributes that these statements bind."""
        inner = (node for top in self.setup for node in ast.walk(top))
        return {
            node.attr
            for node in inner
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
        }


class _Flattening(ast.NodeTransformer):
    """Replaces `self.name` by `name` if that is defined and unused; collects definitions in `bindings`."""

    def __init__(self, members: _Members, self_name: str, taken: set[str], is_helper: bool = False) -> None:
        """`is_helper`: attributes that it binds stay, as it would bind a local name of its own instead."""
        self.bindings: list[ast.stmt] = []
        self._members, self._self, self._taken = members, self_name, taken
        self._is_helper = is_helper
        self._names: dict[str, str] = {}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == self._self):
            return self.generic_visit(node)
        if self._is_helper and not isinstance(node.ctx, ast.Load):
            return node
        name = self._names.get(node.attr) or self._bind(node.attr)
        return ast.copy_location(ast.Name(name, node.ctx), node) if name else node

    def _bind(self, attribute: str) -> str:
        """The name for an attribute; empty if its definition is not known or the name is taken."""
        members, name = self._members, attribute.strip("_")
        method, value = members.methods.get(attribute), members.values.get(attribute)
        if not name or name in self._taken or name.startswith("test"):
            return ""
        if attribute not in members.set_up and value is None and not _is_plain(method):
            return ""
        self._names[attribute] = name
        self._taken.add(name)
        if method is not None and attribute not in members.set_up:
            function = copy.deepcopy(method)
            function.name, function.decorator_list = name, []
            if not method.decorator_list:
                own, function.args.args = function.args.args[0].arg, function.args.args[1:]
                inside = _Flattening(members, own, self._taken, is_helper=True)
                inside._names, inside.bindings = self._names, self.bindings
                function.body = [inside.visit(one) for one in function.body]
            self.bindings.append(function)
        elif value is not None:
            target = ast.Assign([ast.Name(name, ast.Store())], value, lineno=0)
            self.bindings.append(target)
        return name


def _is_plain(method: ast.FunctionDef | None) -> bool:
    """Whether it is an instance or static method in which no local name equals an attribute that it uses."""
    if method is None:
        return False
    inner = list(ast.walk(method))
    own = {one.id for one in inner if isinstance(one, ast.Name)}
    own |= {one.arg for one in inner if isinstance(one, ast.arg)}
    if own & {one.attr.strip("_") for one in inner if isinstance(one, ast.Attribute) and _is_self(one.value)}:
        return False
    decorators = [ast.unparse(one) for one in method.decorator_list]
    return decorators == ["staticmethod"] or (not decorators and bool(method.args.args))


def _with_bases(owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class and its bases in the file, nearest first."""
    yield owner
    for base in owner.bases:
        found = classes.get(ast.unparse(base))
        if found is not None and found is not owner:
            yield from _with_bases(found, {name: one for name, one in classes.items() if one is not owner})


def _defined(node: ast.stmt) -> Sequence[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(one.asname or one.name).partition(".")[0] for one in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
