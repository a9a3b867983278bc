"""Unindexed search over a directory that may change at any time: ripgrep scans it for each query."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from etude.agent.index.grep.query import GrepQuery
from etude.agent.index.grep.ripgrep import Ripgrep, parse_matches
from etude.agent.tools.ports import CodeHits, GrepRequest
from etude.errors import ToolArgumentError
from etude.sandbox.interface import Sandbox
from etude.sandbox.types import GrepMatch

_DEADLINE_S = 30.0
_MOST_BYTES = 16 << 20


class DirectorySearch:
    """Implements `CodeSearch` without an index. Leaves out hidden files and those that git ignores."""

    def __init__(self, sandbox: Sandbox, root: Path, passed_over: Iterable[str]) -> None:
        """`root`: the sandbox's workspace, without links; `passed_over`: names that are not searched. Raises
        ResourceError without ripgrep."""
        self._sandbox = sandbox
        self._root = root
        self._without = [f"!{name}" for name in (".*", *sorted(passed_over))]
        self._ripgrep = Ripgrep()

    async def grep(self, request: GrepRequest) -> Sequence[GrepMatch]:
        place = self._root / request.path
        if place.resolve() != place:
            # A link may lead anywhere on the host; the sandbox enforces its own bounds.
            pattern = f"(?i){request.pattern}" if request.ignore_case else request.pattern
            return await self._sandbox.files.grep(pattern, request.path, request.limit)
        query = GrepQuery(request.pattern, ignore_case=request.ignore_case)
        globs = [word for glob in (*request.globs, *self._without) for word in ("--glob", glob)]
        most = ["--max-count", str(request.limit + 1), "--max-filesize", "8M", "--sort", "path"]
        output = await self._ripgrep.search(
            [*most, *globs, *query.pattern_flags()],
            [b"" if request.path == "." else request.path.encode(errors="surrogateescape")],
            self._root,
            deadline_s=_DEADLINE_S,
            max_bytes=_MOST_BYTES,
        )
        found = [match for file in parse_matches(output) for match in file.matches()]
        return found[: request.limit]

    async def semantic(self, query: str, limit: int, path: str = ".") -> CodeHits:
        """See CodeSearch. Raises ToolArgumentError: there is no index."""
        raise ToolArgumentError("no semantic index here: use grep", field="query")

    def changed(self, path: str) -> None:
        """See CodeSearch. Does nothing: there is no state."""

    def changed_somewhere(self) -> None:
        """See CodeSearch. Does nothing: there is no state."""

    def close(self) -> None:
        """See CodeSearch. Does nothing: there is no state."""
