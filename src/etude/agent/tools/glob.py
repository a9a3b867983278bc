"""The tool `glob`."""

from __future__ import annotations

from etude.agent.globs import compile_glob
from etude.agent.tools.interface import Access, Arguments, ToolContext, reads_path, shown
from etude.agent.tools.list_dir import visible
from etude.agent.tools.text_file import directory_of
from etude.kit.tasks import off_loop
from etude.records import ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

_DEPTH = 100
_CHARACTERS_PER_PATH = 40


class Glob:
    """Lists the files whose paths match a pattern, one per line, sorted by path.

    Arguments: `pattern` (`*.py` at any depth, `lib/*.py`, `**/test_*.py`, `*.{c,h}`: see `globs`), matched
    against paths from `path` on; `path` (directory, default: the whole workspace).
    Limits: `list_entries` paths; directories are not listed; `.git`, `__pycache__` and `.etude` are left out
    unless `path` names them. Returns `no match` where nothing fits: no error.
    Errors: INVALID_ARGUMENTS for a broken pattern, UNEXPECTED_ENVIRONMENT for a missing path or a file.
    """

    repeatable = True
    schema = ToolSchema(
        "glob",
        "List files whose paths match a pattern.",
        (
            Parameter("pattern", "such as **/*.py"),
            Parameter("path", "directory, default the whole workspace", required=False),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return reads_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        fits = compile_glob(arguments["pattern"])
        path = directory_of(arguments, context)
        entries = await context.sandbox.files.list(path, _DEPTH)
        start = 0 if path == "." else len(path) + 1

        def matching() -> list[str]:
            files = (entry.path for entry in visible(entries, path) if entry.kind != "dir")
            return [file for file in files if fits(file[start:])]

        paths = await off_loop(_CHARACTERS_PER_PATH * len(entries), matching)
        if not paths:
            return ToolResult("no match", facts={"num_matches": 0})
        kept = paths[: context.limits.list_entries]
        facts = {"num_matches": len(paths)}
        if len(kept) < len(paths):
            kept.append(f"... {len(paths) - len(kept)} more")
        return ToolResult(shown("\n".join(kept)), facts=facts)
