"""Indexes of sandbox templates: each built once, in the background, when the first session asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

from etude.agent.index import semantic
from etude.agent.index.grep import Overlay as GrepOverlay
from etude.agent.index.trees import IndexProgress, TreeIndex
from etude.agent.index.workspace import WorkspaceSearch
from etude.errors import EtudeError
from etude.sandbox.interface import Sandbox
from etude.sandbox.template import Template

Report = Callable[[str], None]


class TemplateIndexes:
    """Code indexes by template, for all sessions of one process. For one event loop.

    A template's files are laid out once below `state`, so that nobody's edits reach what is indexed. A build
    that fails is reported once, and its sessions search by their sandboxes.
    """

    def __init__(
        self, state: Path, embedder: semantic.Embedder | None, report: Report = lambda words: None
    ) -> None:
        self._state = state
        self._embedder = embedder
        self._report = report
        self._trees: dict[str, _Lazy] = {}

    def search(self, template: Template, sandbox: Sandbox) -> WorkspaceSearch:
        """A view for a session whose sandbox started from `template`. Returns at once."""
        return WorkspaceSearch(sandbox, self._lazy(template))

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

    def _lazy(self, template: Template) -> _Lazy:
        lazy = self._trees.get(template.digest)
        if lazy is None:
            lazy = self._trees[template.digest] = _Lazy(template, self._state, self._embedder, self._report)
        return lazy


class _Lazy:
    """Implements `Overlays`: nothing, until the index of its template can be asked."""

    def __init__(
        self, template: Template, state: Path, embedder: semantic.Embedder | None, report: Report
    ) -> None:
        self._tree: TreeIndex | None = None
        self._report = report
        self._progress: Callable[[IndexProgress], None] = lambda progress: None
        self._starting = asyncio.create_task(self._start(template, state, embedder))

    def grep_overlay(self) -> GrepOverlay | None:
        return None if self._tree is None else self._tree.grep_overlay()

    def semantic_overlay(self) -> semantic.Overlay | None:
        return None if self._tree is None else self._tree.semantic_overlay()

    async def ready(self, progress: Callable[[IndexProgress], None] | None) -> None:
        self._progress = progress or self._progress
        await asyncio.shield(self._starting)
        if self._tree is not None:
            await self._tree.ready()

    async def close(self) -> None:
        self._starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._starting
        if self._tree is not None:
            await self._tree.close()

    async def _start(self, template: Template, state: Path, embedder: semantic.Embedder | None) -> None:
        try:
            root = await asyncio.to_thread(lay_out, template, state / "trees")
            tree = TreeIndex(root, state, template.digest, embedder)
            await tree.start(lambda progress: self._progress(progress))
        except (EtudeError, OSError) as error:
            self._report(f"no code index: {error}")
        else:
            self._tree = tree


def lay_out(template: Template, directory: Path) -> Path:
    """The template's files below `directory`, whole or not at all. Raises OSError."""
    target = directory / template.digest
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        # One process at a time: whose draft is there otherwise has died.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        draft = directory / f".{template.digest}.new"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for path, content in template.contents.items():
            file = draft / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        draft.rename(target)
    return target
