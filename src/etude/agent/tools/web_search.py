"""The tool `web_search`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, failure, integer, shorten
from etude.agent.tools.output_files import readable
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

NUM_RESULTS = 10
_DEFAULT_RESULTS = 5
_QUERY_CHARACTERS = 400
_EXCERPT_CHARACTERS = 400


class WebSearch:
    """Searches the web.

    Arguments: `query`; `limit?`: number of results, 5 by default.
    Returns for each result its title, address and excerpt; `no match`.
    Limits: 10 results, 400 characters of query and of each excerpt; only hosts that `fetch` may read.
    Errors: invalid_arguments for an empty query or a limit out of range; unexpected_environment where the
    session has no web. A provider that fails is infrastructure: the call is tried again, and never answered
    with nothing.
    """

    repeatable = True
    schema = ToolSchema(
        "web_search",
        "Search the web.",
        (
            Parameter("query", "what to look for"),
            Parameter("limit", "number of results", required=False, kind="integer"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return Access(reads=frozenset({"web:"}))

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        query = " ".join(readable(arguments["query"]).split())
        if not query:
            raise ToolArgumentError("query is empty", field="query")
        if len(query) > _QUERY_CHARACTERS:
            raise ToolArgumentError(f"more than {_QUERY_CHARACTERS} characters", field="query")
        limit = integer(arguments, "limit", _DEFAULT_RESULTS)
        if not 1 <= limit <= NUM_RESULTS:
            raise ToolArgumentError(f"limit must be 1 to {NUM_RESULTS}", field="limit", received=limit)
        if context.web is None:
            return failure("there is no web here", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        results = await context.web.search(query, limit)
        blocks = [
            "\n".join(
                part
                for part in (result.title, result.url, shorten(result.excerpt, _EXCERPT_CHARACTERS))
                if part
            )
            for result in results[:limit]
        ]
        facts = {"kind": "web_search", "num_results": len(blocks)}
        return ToolResult(readable("\n\n".join(blocks)) or "no match", facts=facts)
