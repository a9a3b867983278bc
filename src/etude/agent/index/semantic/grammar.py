"""Which tree-sitter grammar reads a file, and which of its nodes are functions and classes.

Each grammar is a wheel of its own (`tree-sitter-python`, ...) and used if it is installed. A file without a
grammar is cut by lines: search still works, with ranges that ignore function boundaries.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

from etude.errors import ConfigError
from etude.errors.packages import install_command, package_of


@dataclass(frozen=True, slots=True)
class Language:
    """A grammar and the names of its nodes."""

    name: str
    module: str
    """Python module of the grammar's wheel."""
    functions: frozenset[str]
    """Nodes that make one chunk."""
    containers: frozenset[str]
    """Nodes whose members make chunks: classes, implementations, name spaces."""
    wrappers: frozenset[str] = frozenset()
    """Nodes around a definition that belong to it: decorators, exports, assignments."""
    leading: frozenset[str] = frozenset({"comment", "line_comment", "block_comment"})
    """Siblings that belong to the definition that directly follows them."""
    factory: str = "language"


def _language(
    name: str, module: str, functions: str, containers: str, wrappers: str = "", **more: Any
) -> Language:
    return Language(
        name,
        module,
        frozenset(functions.split()),
        frozenset(containers.split()),
        frozenset(wrappers.split()),
        **more,
    )


_SCRIPT = (
    "function_declaration generator_function_declaration method_definition arrow_function "
    "function_expression",
    "class_declaration class abstract_class_declaration interface_declaration internal_module module",
    "export_statement lexical_declaration variable_declaration variable_declarator expression_statement "
    "public_field_definition field_definition",
)
_RUST_LEADING = frozenset({"line_comment", "block_comment", "attribute_item"})

_PYTHON = _language(
    "python", "tree_sitter_python", "function_definition", "class_definition", "decorated_definition"
)
_JAVASCRIPT = _language("javascript", "tree_sitter_javascript", *_SCRIPT)
_TYPESCRIPT = _language("typescript", "tree_sitter_typescript", *_SCRIPT, factory="language_typescript")
_TSX = _language("tsx", "tree_sitter_typescript", *_SCRIPT, factory="language_tsx")
_GO = _language("go", "tree_sitter_go", "function_declaration method_declaration type_declaration", "")
_RUST = _language(
    "rust",
    "tree_sitter_rust",
    "function_item struct_item enum_item macro_definition",
    "impl_item trait_item mod_item",
    leading=_RUST_LEADING,
)
_JAVA = _language(
    "java",
    "tree_sitter_java",
    "method_declaration constructor_declaration",
    "class_declaration interface_declaration enum_declaration record_declaration",
)
_C = _language(
    "c", "tree_sitter_c", "function_definition struct_specifier enum_specifier", "", "type_definition"
)
_CPP = _language(
    "cpp",
    "tree_sitter_cpp",
    "function_definition enum_specifier",
    "class_specifier struct_specifier namespace_definition",
    "template_declaration type_definition",
)

_BY_SUFFIX = {
    **dict.fromkeys(("py", "pyi"), _PYTHON),
    **dict.fromkeys(("js", "mjs", "cjs", "jsx"), _JAVASCRIPT),
    **dict.fromkeys(("ts", "mts", "cts"), _TYPESCRIPT),
    "tsx": _TSX,
    "go": _GO,
    "rs": _RUST,
    "java": _JAVA,
    "c": _C,
    **dict.fromkeys(("h", "cc", "cpp", "cxx", "hh", "hpp", "hxx"), _CPP),
}


def language_of(path: str) -> Language | None:
    """The language of a path by its suffix, if its grammar is installed."""
    language = _BY_SUFFIX.get(path.rpartition(".")[2].lower())
    return language if language is not None and grammar_version(language.module) else None


@cache
def grammar_version(module: str) -> str:
    """Versions of tree-sitter and a grammar; "" if one is missing. Part of what chunks are keyed by."""
    if importlib.util.find_spec("tree_sitter") is None or importlib.util.find_spec(module) is None:
        return ""
    names = ("tree-sitter", module.replace("_", "-"))
    return "/".join(importlib.metadata.version(name) for name in names)


def parser_for(language: Language) -> Any:
    """A new parser: no two threads may use one at once. Raises `ConfigError` if versions do not fit."""
    tree_sitter = importlib.import_module("tree_sitter")
    return tree_sitter.Parser(_grammar(language))


@cache
def _grammar(language: Language) -> Any:
    tree_sitter = importlib.import_module("tree_sitter")
    grammar = getattr(importlib.import_module(language.module), language.factory)()
    try:
        return tree_sitter.Language(grammar)
    except ValueError as error:
        raise ConfigError(
            f"the grammar does not fit the installed tree-sitter: {error}",
            received=grammar_version(language.module),
            fix=install_command("--upgrade", "tree-sitter", package_of(language.module)),
        ) from error
