"""The tool `delete_file`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, failure, writes_path
from etude.agent.tools.text_file import writable_path
from etude.agent.tools.values import flag
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.errors import PathKindError, fault_error
from etude.sandbox.inside import faults
from etude.sandbox.types import FileInfo
from etude.tokens.grammar import Parameter, ToolSchema

_DEPTH = 100


class DeleteFile:
    """Deletes a file, a link (not what it names) or an empty directory; with `recursive` any directory.

    Arguments: `path`; `recursive` (true: a directory with all that it holds).
    Returns `ok`, or `ok, 12 files` for a directory that held some.
    Errors: UNEXPECTED_ENVIRONMENT for a missing path and for a directory that is not empty;
    INVALID_ARGUMENTS for a path outside and for the workspace itself.
    """

    repeatable = False
    schema = ToolSchema(
        "delete_file",
        "Delete a file or directory.",
        (
            Parameter("path", "file or directory to delete"),
            Parameter("recursive", "true: a directory with all it holds", required=False, kind="boolean"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return writes_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        path = writable_path(arguments, context)
        if path == ".":
            raise ToolArgumentError("the workspace itself stays", field="path")
        recursive = flag(arguments, "recursive")
        files = context.sandbox.files
        gone, output = [path], "ok"
        if await _kind(path, context) == "dir":
            inside = await files.list(path, _DEPTH if recursive else 1)
            if inside and not recursive:
                message = f"the directory holds {len(inside)} entries: delete it with recursive true"
                return failure(message, ToolErrorClass.UNEXPECTED_ENVIRONMENT)
            gone = [entry.path for entry in inside if entry.kind != "dir"]
            output = f"ok, {len(gone)} files" if gone else "ok"
        await files.remove(path)
        for file in gone:
            context.changed(file)
        return ToolResult(output, facts={"kind": "edit", "path": path, "line": 1, "changed": True})


async def _kind(path: str, context: ToolContext) -> str:
    """Kind of the entry itself; links are not followed. Raises PathMissingError, PathKindError."""
    parent, _, _ = path.rpartition("/")
    try:
        entries: list[FileInfo] = await context.sandbox.files.list(parent or ".", 1)
    except PathKindError as error:
        raise fault_error(faults.PART_IS_FILE, "path", path) from error
    kinds = [entry.kind for entry in entries if entry.path == path]
    if not kinds:
        raise fault_error(faults.MISSING, "path", path)
    return kinds[0]
