"""The tool `semantic_search`."""

from __future__ import annotations

from etude.agent.tools.interface import (
    Access,
    Arguments,
    ToolContext,
    failure,
    integer,
    reads_path,
    shorten,
    shown,
)
from etude.agent.tools.ports import CodeHit
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.paths import normal_path
from etude.tokens.grammar import Parameter, ToolSchema

NUM_HITS = 20
_DEFAULT_HITS = 5
_HIT_LINES = 12
_QUERY_CHARACTERS = 1000


class SemanticSearch:
    """Finds pieces of code by what they mean, best first.

    Arguments: `query`: what the code does, in words; `path?`: file or directory below which to search;
    `limit?`: number of pieces, 5 by default.
    Returns for each `path:first-last name` and its first 12 lines, numbered as `read_file` does; `no match`;
    `the index is not complete yet` on a last line while it is still being built.
    Limits: 20 pieces, 1,000 characters of query, `line_characters`.
    Errors: invalid_arguments for an empty query, a limit out of range, a path outside; unexpected_environment
    where the session has no index.
    """

    repeatable = True
    schema = ToolSchema(
        "semantic_search",
        "Find code by what it does.",
        (
            Parameter("query", "what the code does"),
            Parameter("path", "file or directory, default the whole workspace", required=False),
            Parameter("limit", "number of results", required=False, kind="integer"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return reads_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        query = arguments["query"].strip()
        if not query:
            raise ToolArgumentError("query is empty", field="query")
        if len(query) > _QUERY_CHARACTERS:
            raise ToolArgumentError(f"more than {_QUERY_CHARACTERS} characters", field="query")
        limit = integer(arguments, "limit", _DEFAULT_HITS)
        if not 1 <= limit <= NUM_HITS:
            raise ToolArgumentError(f"limit must be 1 to {NUM_HITS}", field="limit", received=limit)
        path = normal_path(arguments.get("path", "").strip() or ".", context.workspace)
        if context.search is None:
            return failure("no index", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        found = await context.search.semantic(query, limit, path)
        blocks = [_shown_hit(hit, context.limits.line_characters) for hit in found.hits[:limit]]
        blocks = blocks or ["no match"]
        if not found.complete:
            blocks.append("the index is not complete yet")
        facts = {"kind": "semantic_search", "num_hits": len(found.hits), "complete": found.complete}
        return ToolResult(shown("\n\n".join(blocks)), facts=facts)


def _shown_hit(hit: CodeHit, line_characters: int) -> str:
    head = f"{hit.path}:{hit.first_line}-{hit.last_line} {hit.symbol}".rstrip()
    lines = hit.text.removesuffix("\n").split("\n")
    rows = [
        f"{number}\t{shorten(line, line_characters)}"
        for number, line in enumerate(lines[:_HIT_LINES], hit.first_line)
    ]
    if len(lines) > _HIT_LINES:
        rows.append(f"... {len(lines) - _HIT_LINES} more lines")
    return "\n".join([head, *rows])
