"""Functions with names: their source, identity, inputs and results."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from etude.kit.syntax import parse_python
from etude_quickstart.families import HELPER, PARAMETERS, Family, Kind, Result, Shape
from etude_quickstart.inputs import draw_arguments

# fmt: off
NAMES: tuple[str, ...] = (
    "tally", "drift", "blend", "carve", "chant", "clasp", "craft", "crest",
    "croft", "delta", "drape", "dwell", "ember", "fetch", "field", "flint",
    "flute", "forge", "frame", "frost", "gauge", "glade", "gleam", "glide",
    "grain", "graph", "grove", "guard", "haven", "hedge", "index", "judge",
    "ledge", "level", "light", "maple", "merge", "metal", "mixer", "north",
    "ocean", "orbit", "patch", "pilot", "pixel", "plain", "plant", "prism",
    "pulse", "queue", "quill", "radar", "reach", "ridge", "river", "robin",
    "rotor", "scale", "scout", "shade", "shift", "slate", "spark", "table",
)
"""Names of functions and of the files that hold them."""
# fmt: on

DIRECTORIES: tuple[str, ...] = ("lib", "core", "util")
"""Folders of the files."""

_NUMBER_NAMES = ("a", "b", "c", "k", "m")
_LIST_NAMES = ("xs", "ys")
_WORD = re.compile(r"[A-Za-z_]\w*")
_DIGIT = re.compile(r"(?<![\w.])\d(?!\w)")


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A correct function of a family, as the content of a file."""

    name: str
    family: str
    directory: str
    signature: tuple[str, ...]
    """Parameters as written, defaults included."""
    kinds: tuple[Kind, ...]
    """Type of each parameter."""
    docstring: str
    lines: tuple[str, ...]
    """The body without the outer indentation."""
    returns: Result
    hash: str
    """See `function_hash`; always of the correct function."""
    imports: tuple[str, ...] = ()
    constants: tuple[int, ...] = ()
    """Numbers in the code; inputs are drawn near them."""

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name}.py"

    @property
    def module(self) -> str:
        return f"{self.directory}.{self.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(entry.partition("=")[0] for entry in self.signature)

    @property
    def source(self) -> str:
        """The content of the file."""
        head = "".join(f"{line}\n" for line in self.imports) + ("\n" if self.imports else "")
        body = "".join(f"    {line}\n" for line in self.lines)
        return f'{head}def {self.name}({", ".join(self.signature)}):\n    """{self.docstring}"""\n{body}'

    def draw_inputs(self, rng: Random) -> tuple[Any, ...]:
        """Arguments for one call; those with a default are sometimes left out."""
        arguments = draw_arguments(rng, self.kinds, self.constants)
        optional = sum("=" in entry for entry in self.signature)
        return arguments[:-optional] if optional and rng.random() < 0.5 else arguments


def shape_source(shape: Shape) -> str:
    """The shape as a function with canonical names and without a docstring."""
    body = "".join(f"    {line}\n" for line in shape.lines)
    return f"def f({', '.join(shape.signature)}):\n{body}"


def name_shape(
    shape: Shape,
    family: str,
    name: str,
    rng: Random,
    imports: Sequence[FunctionSpec] = (),
) -> FunctionSpec:
    """Assigns a shape its name, folder and parameter names. `imports` has at most one helper."""
    renames = _draw_names(shape.parameters, rng)
    constants = {int(digit) for digit in _DIGIT.findall("\n".join(shape.lines))}
    for helper in imports:
        renames[HELPER] = helper.name
        constants.update(helper.constants)

    def rename(text: str) -> str:
        return _WORD.sub(lambda match: renames.get(match[0], match[0]), text)

    return FunctionSpec(
        name=name,
        family=family,
        directory=rng.choice(DIRECTORIES),
        signature=tuple(rename(entry) for entry in shape.signature),
        kinds=tuple(PARAMETERS[parameter] for parameter in shape.parameters),
        docstring=rename(shape.docstring),
        lines=tuple(rename(line) for line in shape.lines),
        returns=shape.returns,
        hash=shape_hash(shape),
        imports=tuple(f"from {helper.module} import {helper.name}" for helper in imports),
        constants=tuple(sorted(constants)),
    )


def draw_function(family: Family, name: str, rng: Random) -> FunctionSpec:
    """A function of the family with the given name."""
    return name_shape(family.draw(rng), family.name, name, rng)


def _draw_names(parameters: Iterable[str], rng: Random) -> dict[str, str]:
    numbers = iter(rng.sample(_NUMBER_NAMES, 3))
    lists = iter(rng.sample(_LIST_NAMES, 2))
    renames: dict[str, str] = {}
    for parameter in parameters:
        if PARAMETERS[parameter] == "number":
            renames[parameter] = next(numbers)
        elif PARAMETERS[parameter] == "numbers":
            renames[parameter] = next(lists)
    return renames


def shape_hash(shape: Shape) -> str:
    """The hash of functions of this shape, which is independent of names."""
    return _source_hash(shape_source(shape))


@lru_cache(maxsize=1 << 15)
def _source_hash(source: str) -> str:
    return function_hash(source)


def function_hash(source: str) -> str:
    """Identity of a function: its syntax tree without docstring, names replaced by order of appearance.

    `source` is a file with one function. The function's own name, imported names, parameters and locals
    are replaced; builtins, methods and constants are kept. Two functions with the same hash differ in
    names and words only. 16 hexadecimal digits.
    """
    tree = parse_python(source)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: HELPER for node in imported for alias in node.names}
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own |= {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    parts: list[str] = []
    _write(function.args, names, own, parts)
    for statement in body:
        _write(statement, names, own, parts)
    return hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest()


def _write(node: ast.AST, names: dict[str, str], own: set[str], parts: list[str]) -> None:
    """Appends the tree in prefix form."""
    parts.append(f"({type(node).__name__}")
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, ast.AST):
            if not isinstance(value, ast.expr_context):
                _write(value, names, own, parts)
        elif isinstance(value, list):
            parts.append("[")
            for item in value:
                _write(item, names, own, parts)
            parts.append("]")
        elif value is not None:
            parts.append(f" {_neutral(value, field, names, own)!r}")
    parts.append(")")


def _neutral(value: Any, field: str, names: dict[str, str], own: set[str]) -> Any:
    if field not in ("id", "arg") or (value not in own and value not in names):
        return value
    if value not in names:
        names[value] = f"v{sum(name != HELPER for name in names.values())}"
    return names[value]


def compile_functions(sources: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Executes generated files in one namespace; a caller finds its helper there instead of importing it."""
    namespace: dict[str, Any] = {}
    for source in sources:
        text = re.sub(r"^from .* import .*\n", "", source, flags=re.MULTILINE)
        exec(compile(text, "<generated>", "exec"), namespace)
    return {name: value for name, value in namespace.items() if callable(value)}
