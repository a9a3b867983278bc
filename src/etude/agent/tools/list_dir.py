"""The tool `list_dir`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, integer, reads_path, shown
from etude.agent.tools.state import HARNESS_DIRECTORY
from etude.agent.tools.text_file import directory_of
from etude.errors import ToolArgumentError
from etude.records import ToolResult
from etude.sandbox.types import FileInfo
from etude.tokens.grammar import Parameter, ToolSchema

HIDDEN = frozenset({".git", "__pycache__", HARNESS_DIRECTORY})
"""Directories that listings leave out unless their path is asked for."""


class ListDir:
    """Lists all files below a directory, one path per line, sorted.

    Arguments: `path` (default: the whole workspace); `depth` (levels; default: all). With `depth`,
    directories whose contents are not shown end with `/`.
    Limits: `list_entries` lines, `list_depth` levels; `.git`, `__pycache__` and `.etude` are left out unless
    `path` names them. Returns `no files` for an empty directory.
    Errors: UNEXPECTED_ENVIRONMENT for a path that is missing or a file, INVALID_ARGUMENTS for a path outside
    and a depth below 1.
    """

    repeatable = True
    schema = ToolSchema(
        "list_dir",
        "List all files below a directory.",
        (
            Parameter("path", "directory, default the whole workspace", required=False),
            Parameter("depth", "levels to list, default all", required=False, kind="integer"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return reads_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        limits = context.limits
        path = directory_of(arguments, context)
        depth = integer(arguments, "depth", 0)
        if depth < 1 and arguments.get("depth", "").strip():
            raise ToolArgumentError("depth starts at 1", field="depth", received=depth)
        entries = await context.sandbox.files.list(path, min(depth or limits.list_depth, limits.list_depth))
        level = depth + (0 if path == "." else path.count("/") + 1)
        paths = [
            entry.path + ("/" if entry.kind == "dir" else "")
            for entry in visible(entries, path)
            if entry.kind != "dir" or (depth and entry.path.count("/") + 1 == level)
        ]
        if not paths:
            return ToolResult("no files")
        kept = paths[: limits.list_entries]
        if len(kept) < len(paths):
            kept.append(f"... {len(paths) - len(kept)} more")
        return ToolResult(shown("\n".join(kept)))


def visible(entries: list[FileInfo], path: str) -> list[FileInfo]:
    """The entries below `path` that do not lie in a hidden directory."""
    start = 0 if path == "." else len(path)
    return [entry for entry in entries if HIDDEN.isdisjoint(entry.path[start:].split("/"))]
