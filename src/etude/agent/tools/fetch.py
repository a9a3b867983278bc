"""The tool `fetch`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, failure
from etude.agent.tools.output_files import bounded, readable
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.tokens.grammar import Parameter, ToolSchema


class Fetch:
    """Shows a web page as text.

    Arguments: `url`, with http or https.
    Returns the title, where redirects led, and the text.
    Limits: what the web lets through (its allow-list, 2 MiB, 20 seconds by default); `output_characters`: of
    more, head and tail are shown, and the whole is kept in `.etude/outputs/N.txt`.
    Errors: invalid_arguments for no URL, a host that is not allowed, a page that is missing or no text;
    unexpected_environment where the session has no web. A server that fails is infrastructure: the call is
    tried again, and never answered with nothing.
    """

    repeatable = True
    schema = ToolSchema("fetch", "Read a web page.", (Parameter("url", "address of the page"),))

    def access(self, arguments: Arguments) -> Access:
        return Access(reads=frozenset({"web:"}))

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        url = arguments["url"].strip()
        if not url:
            raise ToolArgumentError("url is empty", field="url")
        if context.web is None:
            return failure("there is no web here", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        page = await context.web.fetch(url)
        head = [f"# {page.title}"] if page.title else []
        if page.url != url:
            head.append(f"({page.url})")
        text = await bounded(readable(page.text), context)
        output = readable("\n".join([*head, ""])) + text if head else text
        return ToolResult(output or "empty", facts={"kind": "fetch", "url": page.url})
