"""A Python file with its syntax tree, edited by character positions so that all other text is unchanged."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from etude.kit.syntax import parse_python
from etude.tasks.making.changes import Place

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replaces the characters [start, end) of a file by `text`."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Applies edits, which must not overlap, to a text."""
    pieces, at = list[str](), 0
    for edit in sorted(edits):
        assert at <= edit.start <= edit.end <= len(text), "edits overlap or leave the text"
        pieces += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*pieces, text[at:]])


def read_tree(text: str) -> ast.Module | None:
    """The syntax tree, or None for invalid Python; suppresses syntax warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return parse_python(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


class Source:
    """One parsed file: character positions of nodes, the function of each line, and edits."""

    def __init__(self, path: str, text: str, tree: ast.Module) -> None:
        self.path, self.text, self.tree = path, text, tree
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    @classmethod
    def parse(cls, path: str, text: str) -> Source | None:
        """Parses a file; None if it is not Python, or has carriage returns, which shift line numbers."""
        if not path.endswith(".py") or "\r" in text or text.startswith("\ufeff"):
            return None
        tree = read_tree(text)
        return None if tree is None else cls(path, text, tree)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Node -> its parent."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The ancestors of a node, innermost first, without the module."""
        while (node := self.parents.get(node, self.tree)) is not self.tree:
            yield node

    @cached_property
    def scopes(self) -> dict[Scope, str]:
        """Function or class -> its qualified name."""
        names: dict[Scope, str] = {}
        todo: list[tuple[ast.AST, str]] = [(self.tree, "")]
        while todo:
            node, prefix = todo.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, Scope):
                    names[child] = f"{prefix}{child.name}"
                    todo.append((child, f"{names[child]}."))
                else:
                    todo.append((child, prefix))
        return names

    def offset(self, line: int, column: int) -> int:
        """Converts a syntax tree's position (line from 1, column in UTF-8 bytes) into a character offset."""
        text = self.lines[line - 1]
        if not text.isascii():
            column = len(text.encode("utf-8", "surrogatepass")[:column].decode("utf-8", "surrogatepass"))
        return self.starts[line - 1] + column

    def start(self, node: ast.expr | ast.stmt | ast.keyword | ast.arg | ast.excepthandler) -> int:
        """Offset of a node's beginning, including the decorators of a function or class."""
        decorators = node.decorator_list if isinstance(node, Scope) else []
        if decorators:  # the `@` may have blanks before the expression
            line = decorators[0].lineno
            return self.starts[line - 1] + self.lines[line - 1].index("@")
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.keyword | ast.arg | ast.excepthandler) -> int:
        """Offset of a node's end."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.expr | ast.stmt | ast.keyword | ast.arg | ast.excepthandler) -> str:
        """The node's text."""
        return self.text[self.start(node) : self.end(node)]

    def replace(self, node: ast.expr | ast.stmt | ast.arg, text: str) -> Edit:
        """The edit that replaces the node by `text`."""
        return Edit(self.start(node), self.end(node), text)

    def own_lines(self, first: ast.stmt | ast.excepthandler, last: ast.stmt) -> tuple[int, int] | None:
        """Offsets of the lines of these statements; None if other code shares one."""
        start, end = self.start(first), self.end(last)
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", end)
        line_end = len(self.text) if line_end < 0 else line_end
        after = self.text[end:line_end].strip()
        if self.text[line_start:start].strip() or (after and not after.startswith("#")):
            return None
        return line_start, min(line_end + 1, len(self.text))

    def remove(self, statement: ast.stmt, block: Sequence[ast.stmt]) -> Edit | None:
        """Removes a statement with its lines, or replaces the only one of its block by `pass`."""
        return self.replace(statement, "pass") if len(block) == 1 else self.remove_lines(statement, statement)

    def remove_lines(self, first: ast.stmt | ast.excepthandler, last: ast.stmt) -> Edit | None:
        """Removes the lines of statements; None if other code shares one."""
        span = self.own_lines(first, last)
        return None if span is None else Edit(*span, "")

    def line_of(self, offset: int) -> int:
        """The line number, from 1, of a character offset."""
        return self.text.count("\n", 0, offset) + 1

    def scope_name(self, first: int, last: int) -> str:
        """Name of the innermost function, else class, that contains these lines; empty for none."""
        holding = [
            (scope.lineno, name)
            for scope, name in self.scopes.items()
            if min([scope.lineno, *(entry.lineno for entry in scope.decorator_list)]) <= first
            and last <= (scope.end_lineno or 0)
        ]
        return max(holding, default=(0, ""))[1]

    def place(self, edits: Sequence[Edit]) -> Place:
        """The range of lines that edits touch."""
        ends = [edit.end - (edit.end > edit.start and self.text[edit.end - 1] == "\n") for edit in edits]
        first, last = self.line_of(min(edit.start for edit in edits)), self.line_of(max(ends))
        return Place(self.path, self.scope_name(first, last), first, max(first, last))


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The non-empty statement lists of a node: body, else, finally."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block


def has_docstring(node: ast.AST) -> bool:
    """Whether a function, class or module has a docstring."""
    body = getattr(node, "body", None)
    return bool(
        isinstance(body, list)
        and body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    )


def is_test_path(path: str) -> bool:
    """Whether a file is a test, test support or packaging, which are never changed."""
    parts = path.split("/")
    name = parts[-1]
    return (
        bool({"test", "tests", "testing", "docs", "doc", "examples", "benchmarks"} & set(parts[:-1]))
        or name.startswith(("test_", "conftest"))
        or name.endswith("_test.py")
        or name in ("setup.py", "noxfile.py", "tasks.py", "__main__.py", "_version.py", "version_info.py")
    )


def read_sources(sources: Mapping[str, str]) -> list[Source]:
    """Parses the files that may be changed, sorted by path, without tests, packaging and other languages."""
    found = (Source.parse(path, sources[path]) for path in sorted(sources) if not is_test_path(path))
    return [source for source in found if source is not None]
