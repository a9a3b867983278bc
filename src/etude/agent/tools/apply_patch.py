"""The tool `apply_patch`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from etude.agent.tools.hunks import apply_hunks
from etude.agent.tools.interface import (
    WRITES_ALL,
    Access,
    Arguments,
    ToolContext,
    accessed_path,
    failure,
    shorten,
    shown,
)
from etude.agent.tools.patches import FilePatch, parse_patch
from etude.agent.tools.text_file import encoded, inner_path, read_text, refuse_harness
from etude.errors import ToolArgumentError
from etude.kit.tasks import off_loop
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.errors import DiskFullError, PathKindError, PathMissingError
from etude.tokens.grammar import Parameter, ToolSchema

_LOOKED_AT = 64 << 10
_MESSAGE_CHARACTERS = 400

Contents = Mapping[str, bytes | None]
"""By path; None where there is no file."""


class ApplyPatch:
    """Applies a unified diff of one file or several: all of it, or nothing.

    Arguments: `patch`: git's or a plain diff, with new, deleted and renamed files. Line numbers and counts
    may be off: hunks are found by their lines (see `patches` and `hunks`). File modes are not carried.
    Returns `ok`, or `ok, 3 files`.
    Limits: `file_bytes` for the patch and for each file, 200 files.
    Errors: INVALID_ARGUMENTS for what is no patch, binary patches, copies, paths outside, files that are
    binary or too large; UNEXPECTED_ENVIRONMENT for a hunk that does not fit (naming it, the line that it
    expects and the one that was found) or fits in several places, a file that is missing or exists already.
    """

    repeatable = False
    schema = ToolSchema(
        "apply_patch",
        "Apply a unified diff, all of it or nothing.",
        (Parameter("patch", "the diff, with --- and +++ lines for each file"),),
    )

    def access(self, arguments: Arguments) -> Access:
        text = arguments.get("patch", "")
        if len(text) > _LOOKED_AT:
            return WRITES_ALL
        try:
            patches = parse_patch(text)
        except ToolArgumentError:
            return Access()
        paths = (path for patch in patches for path in (patch.old_path, patch.new_path))
        return Access(writes=frozenset(accessed_path(path) for path in paths if path is not None))

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        text = arguments["patch"]
        if len(text) > context.limits.file_bytes:
            raise ToolArgumentError("patch too large", field="patch", received=len(text))
        patches = await off_loop(len(text), parse_patch, text)
        patches = [_inside(patch, context) for patch in patches]
        present = await _read(patches, context)
        size = len(text) + sum(len(content) for content in present.values() if content is not None)
        try:
            after, lines = await off_loop(size, _apply, patches, present)
        except ToolArgumentError as error:
            message = shown(shorten(error.message, _MESSAGE_CHARACTERS))
            return failure(message, ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        changes = {
            path: None if content is None else encoded(content, path, context)
            for path, content in after.items()
            if content != present[path]
        }
        before = {path: _bytes(present[path]) for path in changes}
        if changes:
            await _write(changes, before, context)
        first = next(iter(changes or after))
        facts = {"kind": "edit", "path": first, "line": lines.get(first, 1), "changed": bool(changes)}
        if not changes:
            return ToolResult("no change", facts=facts)
        if len(changes) == 1:
            return ToolResult("ok", facts=facts)
        return ToolResult(f"ok, {len(changes)} files", facts={**facts, "paths": shown("\n".join(changes))})


def _inside(patch: FilePatch, context: ToolContext) -> FilePatch:
    """The patch with its paths in normal form. Raises ToolArgumentError for those that may not be written."""
    paths = [None if path is None else inner_path(path, context) for path in (patch.old_path, patch.new_path)]
    for path in paths:
        if path is not None:
            refuse_harness(path)
    return FilePatch(paths[0], paths[1], patch.hunks)


async def _read(patches: Sequence[FilePatch], context: ToolContext) -> dict[str, str | None]:
    """The current content of every file that the patch names."""
    paths = [path for patch in patches for path in (patch.old_path, patch.new_path) if path is not None]

    async def read(path: str) -> str | None:
        try:
            return await read_text(path, context)
        except PathMissingError:
            return None
        except ToolArgumentError as error:
            raise type(error)(
                f"{shorten(path, 80)}: {error.message}", field="patch", received=path
            ) from error

    unique = list(dict.fromkeys(paths))
    return dict(zip(unique, await asyncio.gather(*map(read, unique)), strict=True))


def _apply(
    patches: Sequence[FilePatch], present: Mapping[str, str | None]
) -> tuple[dict[str, str | None], dict[str, int]]:
    """(contents after the patch, first changed lines), by path. Raises ToolArgumentError."""
    after = dict(present)
    lines: dict[str, int] = {}
    for patch in patches:
        old, new = patch.old_path, patch.new_path
        before = "" if old is None else after[old]
        if before is None:
            raise ToolArgumentError(f"{old}: no such file", field="patch")
        if new is not None and new != old and after[new] is not None:
            raise ToolArgumentError(f"{new}: exists already", field="patch")
        text, line = apply_hunks(before, patch.hunks, new or old or "")
        if old is not None and old != new:
            after[old] = None
        if new is None:
            if patch.hunks and text:
                raise ToolArgumentError(f"{old}: has more lines than the patch deletes", field="patch")
            lines.setdefault(old or "", 1)
        else:
            after[new] = text
            lines.setdefault(new, line or 1)
    return after, lines


async def _write(changes: Contents, before: Contents, context: ToolContext) -> None:
    """Writes all files, then deletes the removed ones. Rolls back if the disk or the tree refuses."""
    try:
        await _put(changes, context)
    except (ToolArgumentError, DiskFullError) as error:
        try:
            await _put(before, context)
        except (ToolArgumentError, DiskFullError) as second:
            raise type(error)(
                f"{error.message}; and what was written could not be undone: {second.message}", field="patch"
            ) from error
        raise
    for path in changes:
        context.changed(path)


async def _put(contents: Contents, context: ToolContext) -> None:
    files = context.sandbox.files
    written = {path: data for path, data in contents.items() if data is not None}
    if written:
        await files.write_many(written)
    for path, data in contents.items():
        if data is None:
            try:
                await files.remove(path)
            except (PathMissingError, PathKindError):
                # Nothing is there, or a parent is a file.
                continue


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")
