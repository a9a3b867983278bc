"""Mutation operators within expressions: conditions, operators, boundaries, constants, arguments, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.making.source import Edit, Function, Source, has_docstring

Planted = Iterator[tuple[str, Sequence[Edit | None]]]
"""The operator, such as `inverted condition`, and its edits; None among them if one is impossible, in which
case the mutation is dropped."""
Others = Mapping[type[ast.AST], tuple[str, str]]
"""Operator -> its text, and that of its replacement."""

INVERTED: Others = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
BOUNDARIES: Others = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
ARITHMETIC: Others = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_PAIRS = (
    "min max, any all, startswith endswith, upper lower, lstrip rstrip, find rfind, index rindex, "
    "split rsplit, partition rpartition, keys values, append extend, floor ceil, ljust rjust, "
    "isdigit isalpha, match search, "
    "removeprefix removesuffix, appendleft append, popleft pop, setdefault get, first last, add discard, "
    "encode decode, union intersection, isinstance issubclass, hasattr callable, sorted list, int float"
)
OPPOSITES = {
    old: new for pair in _PAIRS.split(", ") for old, new in [pair.split(), pair.split()[::-1]] if pair
}
_SIMPLE = ast.Name | ast.Constant | ast.Attribute | ast.Subscript


def _between(source: Source, left: ast.expr, right: ast.expr, old: str, new: str) -> Edit | None:
    """Replaces the operator between two operands; None if there is a comment between them."""
    start, end = source.end(left), source.start(right)
    between = source.text[start:end]
    found = re.search(".*?".join(map(re.escape, old.split())), between, re.DOTALL)
    if found is None or "#" in between:
        return None
    return Edit(start + found.start(), start + found.end(), new)


def _change_comparison(source: Source, node: ast.AST, others: Others, what: str) -> Planted:
    """Replaces the operators of a comparison by those in `others`."""
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            if type(operator) in others:
                yield what, [_between(source, left, right, *others[type(operator)])]


def invert_condition(source: Source, node: ast.AST) -> Planted:
    """`if a` becomes `if not a`, `==` becomes `!=`."""
    yield from _change_comparison(source, node, INVERTED, "inverted condition")
    tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
    tests += node.ifs if isinstance(node, ast.comprehension) else []
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield "inverted condition", [source.replace(test, source.segment(test.operand))]
        elif isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield "inverted condition", [Edit(source.start(test), source.start(test), "not ")]


def shift_boundary(source: Source, node: ast.AST) -> Planted:
    """`<` becomes `<=`; an end of a range or slice moves by one."""
    yield from _change_comparison(source, node, BOUNDARIES, "shifted boundary")
    ends = [node.lower, node.upper] if isinstance(node, ast.Slice) else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        ends += node.args[:2]
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
        ends += [node.slice] if _integer(node.slice) is not None else []
    for end in ends:
        number = _integer(end)
        if end is not None and not isinstance(end, ast.Starred):
            text = (
                f"{source.segment(end)} - 1" if number is None else str(number + (1 if number >= 0 else -1))
            )
            yield "shifted boundary", [source.replace(end, text)]


def _integer(node: ast.expr | None) -> int | None:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    value = node.value if isinstance(node, ast.Constant) else None
    return sign * value if isinstance(value, int) and not isinstance(value, bool) else None


def change_operator(source: Source, node: ast.AST) -> Planted:
    """`+` becomes `-`, `+=` becomes `-=`."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not isinstance(node.left, ast.Constant | ast.JoinedStr) or not isinstance(node.op, ast.Mod):
            yield "changed operator", [_between(source, node.left, node.right, *ARITHMETIC[type(node.op)])]
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        old, new = ARITHMETIC[type(node.op)]
        yield "changed operator", [_between(source, node.target, node.value, f"{old}=", f"{new}=")]
        yield "lost accumulation", [_between(source, node.target, node.value, f"{old}=", "=")]


def change_logic(source: Source, node: ast.AST) -> Planted:
    """`and` becomes `or`, or one of several conditions is left out."""
    if not isinstance(node, ast.BoolOp):
        return
    old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    if len(node.values) == 2:
        yield "changed logic", [_between(source, node.values[0], node.values[1], old, new)]
    for left, right in zip(node.values, node.values[1:], strict=False):
        if "#" not in source.text[source.end(left) : source.start(right)]:
            yield "dropped condition", [Edit(_outer_end(source, left), _outer_end(source, right), "")]
    if not source.text[source.start(node) : source.start(node.values[0])]:
        first, second = node.values[:2]
        yield "dropped condition", [Edit(source.start(first), source.start(second), "")]


def _outer_end(source: Source, node: ast.expr) -> int:
    """The end of a node including its enclosing parentheses."""
    start, end = source.start(node), source.end(node)
    while source.text[end : end + 1] == ")" and source.text[start - 1 : start] == "(":
        start, end = start - 1, end + 1
    return end


def change_constant(source: Source, node: ast.AST) -> Planted:
    """True becomes False, a number its successor, short punctuation an empty text."""
    others = ast.Expr | ast.JoinedStr | ast.Slice | ast.Subscript | ast.UnaryOp | ast.arguments
    if not isinstance(node, ast.Constant) or isinstance(source.parents.get(node), others):
        return  # boundaries and defaults are operators of their own
    value = node.value
    if isinstance(value, bool):
        yield "changed constant", [source.replace(node, str(not value))]
    elif isinstance(value, int) and str(value) == source.segment(node):
        yield "changed constant", [source.replace(node, str(value + 1))]
    elif isinstance(value, str) and 0 < len(value) <= 2 and not value.isalnum():
        yield "changed constant", [source.replace(node, '""')]
    elif isinstance(value, str) and value.isidentifier() and len(value) > 2:
        changed = value.lower() if value.lower() != value else value.upper()
        if source.segment(node) in (f'"{value}"', f"'{value}'"):
            yield "changed text", [source.replace(node, source.segment(node).replace(value, changed))]


def change_arguments(source: Source, node: ast.AST) -> Planted:
    """Two arguments are swapped, or a keyword argument is dropped."""
    if not isinstance(node, ast.Call):
        return
    for first, second in zip(node.args, node.args[1:], strict=False):
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and source.segment(first) != source.segment(second):
            yield "swapped arguments", _swap(source, first, second)
    previous: ast.expr | ast.keyword | None = node.args[-1] if node.args else None
    for keyword in node.keywords:
        if previous is not None and keyword.arg is not None and source.end(previous) < source.start(keyword):
            edit = Edit(source.end(previous), source.end(keyword), "")
            if ")" not in source.text[edit.start : source.start(keyword)]:
                yield "dropped argument", [edit]
        previous = keyword


def _swap(source: Source, first: ast.expr, second: ast.expr) -> list[Edit]:
    return [
        source.replace(first, source.segment(second)),
        source.replace(second, source.segment(first)),
    ]


def swap_elements(source: Source, node: ast.AST) -> Planted:
    """A returned or assigned pair is swapped."""
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):
        first, second = node.elts
        parent = source.parents.get(node)
        if isinstance(parent, ast.Return | ast.Assign | ast.Yield) and not (
            isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        ):
            yield "swapped elements", _swap(source, first, second)


def change_name(source: Source, node: ast.AST) -> Planted:
    """A method or builtin becomes its opposite, a method of `self` another one of the same class."""
    if not isinstance(node, ast.Call):
        return
    func = node.func
    old = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
    if old in OPPOSITES:
        end = source.end(func)
        yield "wrong method", [Edit(end - len(old), end, OPPOSITES[old])]
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
        end = source.end(func)
        for other in _siblings(source, node, old):
            yield "wrong method", [Edit(end - len(old), end, other)]


def _siblings(source: Source, node: ast.AST, name: str) -> list[str]:
    """Up to two methods of the same class with as many arguments as the named one."""
    scope = next((one for one in source.ancestors(node) if isinstance(one, ast.ClassDef)), None)
    methods = {entry.name: entry for entry in scope.body if isinstance(entry, Function)} if scope else {}
    if name not in methods:
        return []
    arity = [argument.arg for argument in methods[name].args.args]
    return [
        other
        for other, entry in methods.items()
        if other != name
        and len(entry.args.args) == len(arity)
        and other.startswith("_") == name.startswith("_")
        and not other.startswith("__")
        and not entry.decorator_list
    ][:2]


def change_variable(source: Source, node: ast.AST) -> Planted:
    """Another parameter of the function is read."""
    if not isinstance(node, Function):
        return
    parameters = [argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]]
    parameters = [name for name in parameters if name not in ("self", "cls")]
    for statement in node.body[has_docstring(node) :]:
        for name in ast.walk(statement):
            if (
                isinstance(name, ast.Name)
                and isinstance(name.ctx, ast.Load)
                and name.id in parameters
                and not isinstance(source.parents.get(name), ast.Attribute)
            ):
                at = parameters.index(name.id)
                neighbours = {parameters[at - 1], parameters[(at + 1) % len(parameters)]}
                for other in sorted(neighbours - {name.id}):
                    yield "wrong variable", [source.replace(name, other)]


def remove_wrapper(source: Source, node: ast.AST) -> Planted:
    """`f(x)` becomes `x`, and so does `x.f()`; where `f` copies, the two now share one object."""
    if not isinstance(node, ast.Call) or isinstance(source.parents.get(node), ast.Expr):
        return
    func, inner = node.func, None
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    if len(node.args) == 1 and not node.keywords and isinstance(func, ast.Name):
        inner = None if isinstance(node.args[0], ast.Starred | ast.GeneratorExp) else node.args[0]
        inner = None if name in ("super", "isinstance", "len", "range", "type", "print") else inner
    elif not node.args and not node.keywords and isinstance(func, ast.Attribute):
        is_super = isinstance(func.value, ast.Call) and source.segment(func.value) == "super()"
        inner = None if is_super else func.value
    if inner is not None:
        copies = name in ("copy", "deepcopy", "list", "dict", "set", "tuple")
        is_atom = isinstance(inner, _SIMPLE | ast.Call | ast.List | ast.Dict | ast.Set | ast.ListComp)
        text = source.segment(inner) if is_atom else f"({source.segment(inner)})"
        yield "shared mutable" if copies else "removed wrapper", [source.replace(node, text)]


EXPRESSION_RULES = (
    invert_condition,
    shift_boundary,
    change_operator,
    change_logic,
    change_constant,
    change_arguments,
    swap_elements,
    change_name,
    change_variable,
    remove_wrapper,
)
