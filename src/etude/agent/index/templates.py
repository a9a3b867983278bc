"""Indexes of sandbox templates: each built once, in the background, when the first session asks for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from etude.agent.index import semantic
from etude.agent.index.grep import Overlay as GrepOverlay
from etude.agent.index.trees import IndexProgress, TreeIndex
from etude.agent.index.workspace import WorkspaceSearch
from etude.errors import EtudeError
from etude.kit.durable import DRAFTS, whole_directory
from etude.kit.leftovers import sweep
from etude.kit.tasks import Tasks
from etude.sandbox.interface import Sandbox
from etude.sandbox.template import Template

Report = Callable[[str], None]
_MOST_IDLE = 32
"""Templates whose indexes stay open though no session uses them: each has files open and mapped."""


class TemplateIndexes:
    """Code indexes by template, for all sessions of one process. For one event loop.

    A template's files are laid out once below `state`, so that nobody's edits reach what is indexed. A build
    that fails is reported once, and its sessions search by their sandboxes. What no session has used for
    the longest time is closed, and opened again by the next one.
    """

    def __init__(
        self,
        state: Path,
        embedder: semantic.Embedder | None,
        report: Report = lambda words: None,
        most_idle: int = _MOST_IDLE,
    ) -> None:
        """`most_idle`: templates that stay open without a session."""
        self._state = state
        self._most_idle = most_idle
        self._embedder = embedder
        self._report = report
        self._trees: dict[str, _Lazy] = {}
        """By the template's digest; what was used last comes last."""
        self._num_users: Counter[str] = Counter()
        self._closing = Tasks()

    @property
    def num_open(self) -> int:
        """Templates whose indexes are open."""
        return len(self._trees)

    def search(self, template: Template, sandbox: Sandbox) -> WorkspaceSearch:
        """A view for a session whose sandbox started from `template`, until it is closed. Returns at once."""
        digest = template.digest
        self._num_users[digest] += 1
        return WorkspaceSearch(sandbox, self._lazy(template), lambda: self._release(digest))

    async def ready(
        self, template: Template, progress: Callable[[IndexProgress], None] | None = None
    ) -> None:
        """Waits until the template's indexes are built. Raises what the build raised."""
        await self._lazy(template).ready(progress)

    async def close(self) -> None:
        """Stops all building. What is built stays on disk."""
        trees, self._trees = self._trees, {}
        for lazy in trees.values():
            await lazy.close()
        await asyncio.gather(*self._closing)

    def _lazy(self, template: Template) -> _Lazy:
        lazy = self._trees.pop(template.digest, None)
        if lazy is None:
            lazy = _Lazy(template, self._state, self._embedder, self._report)
        self._trees[template.digest] = lazy
        return lazy

    def _release(self, digest: str) -> None:
        self._num_users -= Counter([digest])
        idle = [one for one, lazy in self._trees.items() if not self._num_users[one] and not lazy.is_building]
        for one in idle[: max(0, len(idle) - self._most_idle)]:
            self._closing.start(self._trees.pop(one).close())


class _Lazy:
    """Implements `Overlays`: nothing, until the index of its template can be asked."""

    def __init__(
        self, template: Template, state: Path, embedder: semantic.Embedder | None, report: Report
    ) -> None:
        self._tree: TreeIndex | None = None
        self._report = report
        self._progress: Callable[[IndexProgress], None] = lambda progress: None
        self._building = asyncio.create_task(self._build(template, state, embedder))

    @property
    def is_building(self) -> bool:
        return not self._building.done()

    def grep_overlay(self) -> GrepOverlay | None:
        return None if self._tree is None else self._tree.grep_overlay()

    def semantic_overlay(self) -> semantic.Overlay | None:
        return None if self._tree is None else self._tree.semantic_overlay()

    async def ready(self, progress: Callable[[IndexProgress], None] | None) -> None:
        self._progress = progress or self._progress
        await asyncio.shield(self._building)
        if self._tree is not None:
            await self._tree.ready()

    async def close(self) -> None:
        self._building.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._building
        if self._tree is not None:
            await self._tree.close()

    async def _build(self, template: Template, state: Path, embedder: semantic.Embedder | None) -> None:
        try:
            root = await asyncio.to_thread(lay_out, template, state / "trees")
            tree = TreeIndex(root, state, template.digest, embedder)
            await tree.start(lambda progress: self._progress(progress))
            self._tree = tree
            await tree.ready()
        except (EtudeError, OSError) as error:
            self._report(f"no code index: {error}" if self._tree is None else f"no whole code index: {error}")


def lay_out(template: Template, directory: Path) -> Path:
    """The template's files below `directory`, whole or not at all. Raises OSError."""
    target = directory / template.digest
    directory.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return target
    sweep(directory, DRAFTS)
    with whole_directory(target, keep=target.exists, sync=False) as draft:
        for path, content in template.contents.items():
            file = draft / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return target
