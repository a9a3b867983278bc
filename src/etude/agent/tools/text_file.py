"""Reads and writes whole text files in a sandbox, preserving bytes that are no UTF-8."""

from __future__ import annotations

from etude.agent.tools.interface import Arguments, ToolContext
from etude.agent.tools.state import HARNESS_DIRECTORY, is_harness_path
from etude.errors import ToolArgumentError
from etude.records import ToolResult
from etude.sandbox.paths import normal_path

_PATH_CHARACTERS = 4096


def path_of(arguments: Arguments, context: ToolContext) -> str:
    """The argument `path` in normal form. Raises ToolArgumentError if it is empty or leads outside."""
    path = arguments["path"].strip()
    if not path:
        raise ToolArgumentError("path is empty", field="path")
    return inner_path(path, context)


def directory_of(arguments: Arguments, context: ToolContext) -> str:
    """As `path_of`, but the whole workspace (`.`) if the argument is missing or empty."""
    return inner_path(arguments.get("path", "").strip() or ".", context)


def writable_path(arguments: Arguments, context: ToolContext) -> str:
    """As `path_of`, for a file that an edit changes. Raises ToolArgumentError in the harness' directory."""
    path = path_of(arguments, context)
    refuse_harness(path)
    return path


def inner_path(path: str, context: ToolContext) -> str:
    """The normal form of a path that the agent wrote. Raises ToolArgumentError."""
    if len(path) > _PATH_CHARACTERS:
        raise ToolArgumentError("path too long", field="path", received=len(path))
    return normal_path(path, context.workspace)


def refuse_harness(path: str) -> None:
    """Raises ToolArgumentError for a normal path that only the harness writes."""
    if is_harness_path(path):
        raise ToolArgumentError(f"{HARNESS_DIRECTORY} is read-only", field="path", received=path)


async def read_text(path: str, context: ToolContext) -> str:
    """The whole file; bytes that are not UTF-8 are surrogate-escaped, so that writing restores them.

    Raises ToolArgumentError for binary files and for files above `file_bytes`.
    """
    return text_of(await context.sandbox.files.read(path, context.limits.file_bytes + 1), path, context)


def text_of(data: bytes, path: str, context: ToolContext) -> str:
    """As `read_text`, from a file's first `file_bytes` + 1 bytes."""
    if len(data) > context.limits.file_bytes:
        raise ToolArgumentError("file too large", field="path", received=path)
    if b"\0" in data:
        raise ToolArgumentError("binary file", field="path", received=path)
    return data.decode("utf-8", "surrogateescape")


async def write_edit(
    path: str, before: str, after: str, line: int, output: str, context: ToolContext
) -> ToolResult:
    """The result of an edit at `line` of the file at a normal path, whose new text it writes and reports to
    the context: `output`, or `no change`.

    Raises ToolArgumentError if the file would grow above `file_bytes`.
    """
    changed = before != after
    if changed:
        await context.sandbox.files.write(path, encoded(after, path, context))
        context.changed(path)
    facts = {"kind": "edit", "path": path, "line": line, "changed": changed}
    return ToolResult(output if changed else "no change", facts=facts)


def encoded(text: str, path: str, context: ToolContext) -> bytes:
    """Inverse of `read_text`, after an edit. Raises ToolArgumentError if the text is too large."""
    refuse_large(len(text), path, context)
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > context.limits.file_bytes:
        raise ToolArgumentError("file too large", field="path", received=path)
    return data


def refuse_large(num_characters: int, path: str, context: ToolContext) -> None:
    """Raises ToolArgumentError for a text that is too large for a file, before it is built or copied."""
    if num_characters > context.limits.file_bytes:
        raise ToolArgumentError("file too large", field="path", received=path)


def line_end(text: str) -> str:
    r"""The line end of a text: `\r\n` if all lines end so, else `\n`."""
    crlf = text.count("\r\n")
    return "\r\n" if crlf and crlf == text.count("\n") else "\n"
