"""Search over one session's workspace: the template's index, with the session's edits laid over it.

Nothing is scanned. Tools report which files they changed. Once a command has run, it and the processes it
left behind may change any file: from then on each search asks the sandbox for its diff to the template, which
its file system knows. Until an index is built, and where the changes are too many for a diff, grep is left to
the sandbox: the matches are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import xxhash

from etude.agent.index import grep, semantic
from etude.agent.tools.ports import CodeHits, GrepRequest
from etude.agent.tools.state import HARNESS_DIRECTORY, is_harness_path
from etude.errors import ToolArgumentError
from etude.sandbox.errors import DiffTooLargeError
from etude.sandbox.interface import Sandbox
from etude.sandbox.types import GrepMatch

MOST_BYTES = 8 << 20
"""Larger edited files are not searched, as in the sandbox."""


class WorkspaceSearch:
    """Implements `CodeSearch` for one session; the underlying indexes are shared by many.

    Until the grep index is built, grep is left to the sandbox; without a semantic index there is no semantic
    search.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        grep_overlay: Callable[[], grep.Overlay | None],
        semantic_overlay: Callable[[], semantic.Overlay | None],
        on_close: Callable[[], None] = lambda: None,
        wait: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`grep_overlay`, `semantic_overlay`: make overlays of the template's indexes; None until built.
        `on_close`: called once, by the first `close`. `wait`: awaited before a semantic search; without it,
        a search uses what is built."""
        self._wait = wait
        self._on_close: Callable[[], None] | None = on_close
        self._sandbox = sandbox
        self._grep_overlay, self._semantic_overlay = grep_overlay, semantic_overlay
        self._matching: grep.Overlay | None = None
        self._meaning: semantic.Overlay | None = None
        self._changed: set[str] = set()
        self._commands_ran = False
        self._known: dict[str, str] = {}
        """Paths that differ from the template -> digest of what the overlays hold."""
        self._refreshing = asyncio.Lock()

    def changed(self, path: str) -> None:
        self._changed.add(path)

    def changed_somewhere(self) -> None:
        self._commands_ran = True

    async def grep(self, request: GrepRequest) -> Sequence[GrepMatch] | None:
        self._attach()
        if self._matching is None or not await self._refresh():
            return None
        query = grep.GrepQuery(
            request.pattern,
            ignore_case=request.ignore_case,
            globs=request.globs,
            path=request.path,
            limit=request.limit,
        )
        return (await self._matching.search(query)).matches

    async def ready(self) -> None:
        """Waits for the index, if semantic searches do. Raises InfrastructureError if its build failed."""
        if self._wait is not None:
            await self._wait()

    async def semantic(self, query: str, limit: int, path: str = ".") -> CodeHits:
        """See CodeSearch. Raises ToolArgumentError where there is no index."""
        await self.ready()
        self._attach()
        if self._meaning is None:
            raise ToolArgumentError("no semantic index here: use grep", field="query")
        current = await self._refresh()
        result = await self._meaning.search(query, limit, path)
        return CodeHits(result.hits, result.complete and current)

    def close(self) -> None:
        """Removes the overlays' files and releases the indexes. Idempotent."""
        if self._matching is not None:
            self._matching.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _attach(self) -> None:
        """Makes overlays of indexes that are built by now, and queues all changes so far for them."""
        before = self._matching, self._meaning
        self._matching = self._matching or self._grep_overlay()
        self._meaning = self._meaning or self._semantic_overlay()
        if before != (self._matching, self._meaning) and self._known:
            self._changed.update(self._known)
            self._known.clear()

    async def _refresh(self) -> bool:
        """Brings the overlays up to date; False if the changes are too many for a diff."""
        async with self._refreshing:
            if self._commands_ran:
                try:
                    differing = await self._sandbox.diff(HARNESS_DIRECTORY)
                except DiffTooLargeError:
                    return False
                await self._apply_diff(differing)
                self._changed.difference_update(differing)
            while self._changed:
                path = self._changed.pop()
                try:
                    content = await self._content(path)
                except BaseException:
                    self._changed.add(path)
                    raise
                self._apply(path, content)
        return True

    async def _apply_diff(self, differing: Mapping[str, bytes | None]) -> None:
        """Applies a diff to the template; known paths that are not in it have their old content again."""
        for path in self._known.keys() - differing.keys():
            self._apply(path, await self._content(path))
            self._known.pop(path, None)
        for path, content in differing.items():
            self._apply(path, content)

    async def _content(self, path: str) -> bytes | None:
        try:
            return await self._sandbox.files.read(path, MOST_BYTES)
        except ToolArgumentError:
            return None

    def _apply(self, path: str, content: bytes | None) -> None:
        if is_harness_path(path):
            return
        digest = "" if content is None else xxhash.xxh3_128_hexdigest(content)
        if self._known.get(path) == digest:
            return
        self._known[path] = digest
        for overlay in filter(None, (self._matching, self._meaning)):
            if content is None:
                overlay.remove(path)
            else:
                overlay.write(path, content)
