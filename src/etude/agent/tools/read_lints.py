"""The tool `read_lints`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from etude.agent.tools.interface import READS_ALL, Access, Arguments, ToolContext, failure, shorten
from etude.agent.tools.linters import Finding, HostRuff, Linter, SandboxRuff, is_linted, new_findings
from etude.agent.tools.state import HARNESS_DIRECTORY
from etude.agent.tools.values import TEXTS, flag, words_of
from etude.kit.tasks import gather_bounded
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.errors import DiffTooLargeError, PathKindError, PathMissingError, Unsupported
from etude.sandbox.paths import normal_path
from etude.tokens.grammar import Parameter, ToolSchema

NUM_FINDINGS = 30
NUM_FILES = 200
_NUM_PATHS = 100
_AT_ONCE = 4
_GIT_S = 10.0
_NO_COMMIT, _NO_FILE = 97, 98

Original = tuple[bool, bytes | None]
"""(whether the file's content at the session's start is known, that content or None if it did not exist)."""


class ReadLints:
    """Shows what a linter finds in the Python files that changed since the session began.

    Arguments: `paths?`: files or directories, between blanks or as a JSON list; `all` = true: all findings,
    not only those that are new.
    Returns one line `lib/a.py:3: F401 ...` for each finding, then `2 findings`; `no new findings`. A finding
    is new if the file held no finding of that rule on a line of that text when the session began; lines that
    moved change nothing.
    The linter is the sandbox's own ruff with the repository's configuration, else the host's with rules on
    syntax, names and plain mistakes (E4, E7, E9, F) over the files' content.
    Limits: 200 files of `file_bytes`, 30 findings, 30 seconds a file.
    Errors: invalid_arguments for a path outside, unexpected_environment for a missing path or where no
    linter is installed.
    """

    repeatable = True
    schema = ToolSchema(
        "read_lints",
        "Show what the linter says about the changed files.",
        (
            Parameter(
                "paths", "files or directories, default all", required=False, kind="array", schema=TEXTS
            ),
            Parameter(
                "all", "true: old findings too, in unchanged files as well", required=False, kind="boolean"
            ),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return READS_ALL

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        paths = [
            normal_path(path, context.workspace) for path in words_of(arguments, "paths", _NUM_PATHS)
        ] or ["."]
        everything = flag(arguments, "all")
        linter = await SandboxRuff.find(context.sandbox) or HostRuff.find()
        if linter is None:
            return failure("no linter is installed", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        files = await (_files_below(paths, context) if everything else _changed_files(paths, context))

        async def lint(file: tuple[str, bytes]) -> tuple[list[Finding], bool]:
            path, content = file
            found = await linter.lint(path, content)
            if everything or not found:
                return found, True
            before = await self._before(path, linter, context)
            return new_findings(found, before or ()), before is not None

        rows = await gather_bounded(lint, files.items(), _AT_ONCE)
        return _shown(dict(zip(files, rows, strict=True)), everything, context)

    async def _before(self, path: str, linter: Linter, context: ToolContext) -> list[str] | None:
        """Keys of the findings at the session's start, computed once; None if unknown."""
        if context.state.findings is None:
            context.state.findings = {}
        if path not in context.state.findings:
            known, content = (
                await last_commit(context, path)
                if context.originals is None
                else (True, context.originals.get(path))
            )
            if not known:
                return None
            found = [] if content is None else await linter.lint(path, content)
            context.state.findings[path] = [finding.key for finding in found]
        return context.state.findings[path]


async def last_commit(context: ToolContext, path: str) -> Original:
    """The file in the last commit of the workspace's repository; unknown if there is none."""
    line = (
        f"git rev-parse -q --verify HEAD >&2 || exit {_NO_COMMIT}\n"
        f"git cat-file blob HEAD:./{shlex.quote(path)} || exit {_NO_FILE}"
    )
    try:
        result = await context.sandbox.commands.run(line, _GIT_S, limit_bytes=context.limits.file_bytes)
    except Unsupported:
        return False, None
    if result.exit_code == _NO_FILE:
        return True, None
    return (True, result.stdout.encode()) if result.exit_code == 0 and not result.truncated else (False, None)


def _shown(
    rows: Mapping[str, tuple[list[Finding], bool]], everything: bool, context: ToolContext
) -> ToolResult:
    """The result: the first findings by path and line, and their number."""
    lines = [
        shorten(
            f"{path}:{finding.line}: {finding.rule} {finding.message}".rstrip(),
            context.limits.line_characters,
        )
        for path in sorted(rows)
        for finding in rows[path][0]
    ]
    count = len(lines)
    new = "" if everything else "new "
    if count > NUM_FINDINGS:
        lines[NUM_FINDINGS:] = [f"... {count - NUM_FINDINGS} more"]
    lines.append(f"{count or 'no'} {new}finding{'' if count == 1 else 's'}")
    if unknown := [path for path in sorted(rows) if not rows[path][1]]:
        lines.append(
            f"all are shown as new of files whose first state is not known: {', '.join(unknown[:5])}"
        )
    return ToolResult("\n".join(lines), facts={"kind": "lint", "num_findings": count, "new": not everything})


async def _changed_files(paths: Sequence[str], context: ToolContext) -> dict[str, bytes]:
    """The Python files below `paths` that changed, with their current content."""
    try:
        diff = await context.sandbox.diff(HARNESS_DIRECTORY)
    except DiffTooLargeError:
        return await _read_files([path for path in context.state.changed if _below(path, paths)], context)
    limit_bytes = context.limits.file_bytes
    kept = [
        (path, content)
        for path, content in sorted(diff.items())
        if content is not None and len(content) <= limit_bytes and is_linted(path) and _below(path, paths)
    ]
    return dict(kept[:NUM_FILES])


async def _files_below(paths: Sequence[str], context: ToolContext) -> dict[str, bytes]:
    """All Python files below `paths`. Raises PathMissingError for a path that names nothing."""
    found: list[str] = []
    for path in paths:
        if is_linted(path):
            await context.sandbox.files.read(path, 1)
            found.append(path)
        else:
            entries = await context.sandbox.files.list(path, context.limits.list_depth)
            found += [entry.path for entry in entries if entry.kind == "file" and _below(entry.path, ["."])]
    return await _read_files(found, context)


async def _read_files(paths: Sequence[str], context: ToolContext) -> dict[str, bytes]:
    """The first `NUM_FILES` Python files of `paths` that still exist and are not too large."""
    limit_bytes = context.limits.file_bytes
    files: dict[str, bytes] = {}
    for path in list(dict.fromkeys(filter(is_linted, paths)))[:NUM_FILES]:
        try:
            content = await context.sandbox.files.read(path, limit_bytes + 1)
        except (PathMissingError, PathKindError):
            continue
        if len(content) <= limit_bytes:
            files[path] = content
    return files


def _below(path: str, paths: Sequence[str]) -> bool:
    if path.startswith(HARNESS_DIRECTORY + "/"):
        return False
    return any(above in (".", path) or path.startswith(above + "/") for above in paths)
