"""The test runner: imports test files anew, calls their functions and reports the results.

Runs in a fork of the warm interpreter inside a sandbox, and in process for the in-memory backend; both
read workspace modules as source text through `Source`, so bytecode, `conftest.py`, `sitecustomize`
and `.pth` files never count. The standard library wins over workspace modules of the same name.

Two ways to run the same files: `run_test_files` judges the assertions and reports per test;
`run_probe_files` runs files in which each assertion was replaced by a call of `__record__`, and
reports the recorded values, to be judged outside of the sandbox.

Standard library only: this file is copied into interpreters without Étude.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any, Protocol, TypedDict

Value = Any
"""A recorded value in JSON form: see `encode_value`."""

MESSAGE_CHARS = 120
SIDE_CHARS = 60
MAX_TESTS = 1000
MAX_VALUES = 10_000
MAX_DEPTH = 50
"""Nesting depth of a recorded value."""
RECORD = "__record__"
"""The name under which probe files find the recorder."""
FIRST_ORACLE = -10
"""Values that a test computes itself are recorded under this index and lower ones: one digest for each."""


class Source(Protocol):
    """Where workspace modules come from."""

    def read(self, path: str) -> str | None:
        """Text of a workspace-relative file; None if there is no such file."""
        ...

    def is_dir(self, path: str) -> bool: ...

    def entries(self, path: str) -> list[str]:
        """Names in a directory, in any order; "" is the workspace. Empty if there is no such directory."""
        ...


class TestRun(TypedDict):
    """Result of `run_test_files`; failures are [name, message]."""

    passed: list[str]
    failed: list[list[str]]
    error: str | None


class ProbeRun(TypedDict):
    """Result of `run_probe_files`; results are [path, name, values, error]."""

    results: list[list[Any]]
    error: str | None


class WorkspaceFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports workspace modules from source, looking below each of `roots` in turn."""

    def __init__(self, source: Source, roots: Sequence[str]) -> None:
        self.source = source
        self.roots = list(roots)
        self._found: dict[str, tuple[str, str]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in sys.stdlib_module_names:
            return None
        relative = fullname.replace(".", "/")
        for root in self.roots:
            base = f"{root}/{relative}" if root else relative
            for name, package in ((base + "/__init__.py", True), (base + ".py", False)):
                text = self.source.read(name)
                if text is not None:
                    self._found[fullname] = (name, text)
                    return importlib.util.spec_from_loader(fullname, self, origin=name, is_package=package)
            if self.source.is_dir(base):
                spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
                spec.submodule_search_locations = [base]
                return spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        name, text = self._found[module.__name__]
        module.__file__ = name
        exec(compiled(text, name), module.__dict__)


_code_cache: dict[tuple[str, str, bool], CodeType] = {}


def compiled(text: str, path: str, rewrite: bool = False) -> CodeType:
    """Compiled code of a module; with `rewrite`, failed assertions report both sides of a comparison."""
    key = (path, text, rewrite)
    code = _code_cache.get(key)
    if code is None:
        if "\0" in text:
            # The error otherwise depends on the interpreter's patch version; reports must not.
            raise SyntaxError("source code string cannot contain null bytes")
        tree = ast.parse(text, path)
        if rewrite:
            tree = ast.fix_missing_locations(_AssertRewriter().visit(tree))
        code = compile(tree, path, "exec", dont_inherit=True)
        if len(_code_cache) >= 1024:
            _code_cache.clear()
        _code_cache[key] = code
    return code


def run_test_files(source: Source, paths: Sequence[str]) -> TestRun:
    """Runs every `test_*` function of the files in order. Never raises for what the files do."""
    report: TestRun = {"passed": [], "failed": [], "error": None}
    scope = {_CHECK: _check, _TRUTH: _truth}
    with _workspace_imports(source, paths):
        for path in paths:
            functions = _load(source, path, scope, rewrite=True)
            if isinstance(functions, str):
                report["error"] = functions
                return report
            for name, function in functions:
                failure = _call(function)
                if failure is None:
                    report["passed"].append(name)
                else:
                    report["failed"].append([name, failure])
    return report


def run_probe_files(source: Source, paths: Sequence[str]) -> ProbeRun:
    """Runs probe files and returns what each `test_*` function recorded. Judges nothing."""
    report: ProbeRun = {"results": [], "error": None}
    values: list[Value] = []
    digests: dict[int, Value] = {}
    num_oracles = 0

    def record(index: int, value: object) -> object:
        nonlocal num_oracles
        if index > FIRST_ORACLE:
            if len(values) < MAX_VALUES:
                values.append([encode_value(index), encode_value(value)])
        elif num_oracles < MAX_VALUES // 2:
            num_oracles += 1
            digests[index] = extend_digest(digests.get(index, ["str", ""]), value)
        return value

    with _workspace_imports(source, paths):
        for path in paths:
            functions = _load(source, path, {RECORD: record}, rewrite=False)
            if isinstance(functions, str):
                report["error"] = functions
                return report
            for name, function in functions:
                values.clear()
                digests.clear()
                num_oracles = 0
                failure = _call(function)
                oracles = [[encode_value(index), digest] for index, digest in digests.items()]
                report["results"].append([path, name, [*values, *oracles], failure])
    return report


def _load(
    source: Source, path: str, scope: dict[str, Any], rewrite: bool
) -> list[tuple[str, Callable[[], object]]] | str:
    """The test functions of one file in order of definition, or why it could not be imported."""
    text = source.read(path)
    if text is None:
        return f"{path}: no such test file"
    name = path.removesuffix(".py").replace("/", ".")
    module = ModuleType(name)
    module.__file__ = path
    module.__dict__.update(scope)
    sys.modules[name] = module
    try:
        exec(compiled(text, path, rewrite), module.__dict__)
    except BaseException as error:
        if isinstance(error, TimeUp):
            raise
        return f"{path}: {describe_error(error)}"
    found = [
        (key, value)
        for key, value in module.__dict__.items()
        if key.startswith("test") and callable(value) and not isinstance(value, type)
    ]
    return found[:MAX_TESTS]


def _call(function: Callable[[], object]) -> str | None:
    try:
        function()
    except TimeUp:
        raise
    except BaseException as error:
        return describe_error(error)
    return None


class TimeUp(BaseException):
    """Raised by the in-process runner's alarm when the time limit of a run is over."""


@contextmanager
def _workspace_imports(source: Source, paths: Sequence[str]) -> Iterator[None]:
    """Enables imports from the workspace and from the test files' folders; unloads them at the end.

    Loaded modules outside the standard library are removed if the workspace has an entry of that name, and
    restored at the end.
    """
    roots = [""]
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder not in roots:
            roots.append(folder)
    finder = WorkspaceFinder(source, roots)
    before = dict(sys.modules)
    own = {entry.removesuffix(".py") for root in roots for entry in source.entries(root)}
    aside = own - sys.stdlib_module_names - {"__main__"}
    for name in before:
        if name.partition(".")[0] in aside:
            del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path[:] = [entry for entry in sys.meta_path if entry is not finder]
        for name in list(sys.modules):
            if name not in before and name.partition(".")[0] not in sys.stdlib_module_names:
                del sys.modules[name]
        for name, module in before.items():
            if name.partition(".")[0] in aside:
                sys.modules[name] = module


# Assertions


_CHECK = "__check__"
_TRUTH = "__truth__"
OPERATORS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "Eq": ("!=", lambda left, right: bool(left == right)),
    "NotEq": ("==", lambda left, right: bool(left != right)),
    "Lt": (">=", lambda left, right: bool(left < right)),
    "LtE": (">", lambda left, right: bool(left <= right)),
    "Gt": ("<=", lambda left, right: bool(left > right)),
    "GtE": ("<", lambda left, right: bool(left >= right)),
    "Is": ("is not", lambda left, right: left is right),
    "IsNot": ("is", lambda left, right: left is not right),
    "In": ("not in", lambda left, right: left in right),
    "NotIn": ("in", lambda left, right: left not in right),
}
"""Comparison node -> (operator in the message of a failed one, function)."""


class _AssertRewriter(ast.NodeTransformer):
    """Rewrites `assert a == b` to a check of both sides, evaluated once and in order."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if node.msg is not None:
            return node
        if isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            operator = ast.Constant(type(node.test.ops[0]).__name__)
            arguments: list[ast.expr] = [operator, node.test.left, node.test.comparators[0]]
            call = ast.Call(ast.Name(_CHECK, ast.Load()), arguments, [])
        else:
            call = ast.Call(ast.Name(_TRUTH, ast.Load()), [node.test], [])
        return ast.copy_location(ast.Expr(call), node)


def _check(operator: str, left: object, right: object) -> None:
    failed, compare = OPERATORS[operator]
    if not compare(left, right):
        raise Failure(failed_comparison(failed, left, right))


def _truth(value: object) -> None:
    if not value:
        raise Failure(f"assert {shorten(repr(value), SIDE_CHARS)}")


class Failure(AssertionError):
    """A failed assertion whose text is already the whole message."""


def failed_comparison(operator: str, left: object, right: object) -> str:
    """`12 != 14`: both sides shortened to 60 characters."""
    return f"{shorten(repr(left), SIDE_CHARS)} {operator} {shorten(repr(right), SIDE_CHARS)}"


def describe_error(error: BaseException) -> str:
    """`ExceptionType: text` on one line; a failed comparison reads `12 != 14`."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(no text)"
    if type(error) is Failure:
        return shorten(text, 2 * MESSAGE_CHARS)
    kind = type(error).__name__
    return shorten(f"{kind}: {text}" if text else kind, MESSAGE_CHARS)


def shorten(text: str, limit: int) -> str:
    """`text` cut in the middle to at most `limit` characters."""
    if len(text) <= limit:
        return text
    head = (limit - 3) // 2
    return text[:head] + "..." + text[len(text) - (limit - 3 - head) :]


# Values that are sent out of the sandbox


def encode_value(value: object) -> Value:
    """Plain data as JSON: [kind, content]. Anything else becomes ["opaque", type name].

    Subclasses count as the plain type that they extend, read with that type's own methods: an overridden
    `__eq__` has no effect.
    """
    try:
        return _encode(value, 0)
    except RecursionError:
        return ["opaque", f"a value nested deeper than {MAX_DEPTH} levels"]


def _encode(value: object, depth: int) -> Value:
    if depth > MAX_DEPTH:
        raise RecursionError
    if value is None:
        return ["none", 0]
    if isinstance(value, bool):
        return ["bool", value is True]
    if isinstance(value, int):
        return ["int", format(int(value), "x")]
    if isinstance(value, float):
        number = float(value)
        return ["float", number.hex() if math.isfinite(number) else repr(number)]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    for kind, plain in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, plain):
            return [kind, [_encode(item, depth + 1) for item in value]]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return [
            "dict",
            [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in pairs],
        ]
    return ["opaque", type(value).__name__]


def extend_digest(digest: Value, value: object) -> Value:
    """`digest` extended by one more value, in the form of an encoded value.

    It is the same for equal plain data, and opaque once a value is not plain data.
    """
    from hashlib import blake2b  # few test files need it, and every warm interpreter would pay for it

    try:
        text = repr((digest, _comparable(encode_value(value))))
    except ValueError:
        return ["opaque", type(value).__name__]
    is_data = digest[0] != "opaque"
    return ["str", blake2b(text.encode(), digest_size=32).hexdigest()] if is_data else digest


def _comparable(value: Value) -> Value:
    """Canonical form of an encoded value, the same for equal values: 1 and 1.0, sets and dicts in any order.
    Raises ValueError if it is not plain data."""
    kind, content = value
    if kind == "opaque":
        raise ValueError
    if kind == "bool":
        return ["int", format(content, "x")]
    if kind == "float":
        number = float.fromhex(content)
        return ["int", format(int(number), "x")] if number.is_integer() else value
    if kind in ("list", "tuple"):
        return [kind, [_comparable(item) for item in content]]
    if kind == "set":
        return [kind, sorted({repr(_comparable(item)) for item in content})]
    if kind == "dict":
        pairs = {repr(_comparable(key)): repr(_comparable(item)) for key, item in content}
        return [kind, sorted(pairs.items())]
    return value
