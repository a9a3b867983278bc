"""A web in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etude.agent.html_text import html_to_text
from etude.agent.tools.ports import WebPage, WebResult
from etude.errors import EtudeError, ToolArgumentError

_EXCERPT_CHARACTERS = 200


class FakeWeb:
    """Implements `tools.ports.Web` over given pages: URL -> HTML or text, or the error that it raises."""

    def __init__(self, pages: Mapping[str, str | EtudeError], search_error: EtudeError | None = None) -> None:
        """`search_error` is raised by every search."""
        self._pages = pages
        self._search_error = search_error
        self.fetched: list[str] = []
        """URLs in the order in which they were asked for."""

    async def fetch(self, url: str) -> WebPage:
        """See Web.fetch. A URL that is not among the pages is missing."""
        self.fetched.append(url)
        page = self._pages.get(url)
        if page is None:
            raise ToolArgumentError("no such page (404)", field="url", received=url)
        if isinstance(page, EtudeError):
            raise page
        title, text = html_to_text(page) if "<" in page else ("", page)
        return WebPage(url, title, text)

    async def search(self, query: str, limit: int) -> Sequence[WebResult]:
        """See Web.search: the pages that hold most of the words, in their order."""
        if self._search_error is not None:
            raise self._search_error
        words = set(query.lower().split())
        found: list[tuple[int, WebResult]] = []
        for url, page in self._pages.items():
            if isinstance(page, str):
                title, text = html_to_text(page) if "<" in page else ("", page)
                hits = sum(word in f"{title} {text}".lower() for word in words)
                if hits:
                    found.append((hits, WebResult(url, title, text[:_EXCERPT_CHARACTERS])))
        return [result for _, result in sorted(found, key=lambda pair: -pair[0])[:limit]]
