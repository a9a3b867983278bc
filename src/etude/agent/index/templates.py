"""Indexes of sandbox templates: each built once, in the background, when the first session asks for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etude.agent.index import grep, semantic
from etude.agent.index.workspace import WorkspaceSearch
from etude.errors import StoreError
from etude.kit.durable import DRAFTS, whole_directory
from etude.kit.leftovers import sweep
from etude.kit.tasks import Tasks, end_tasks, start_watched
from etude.sandbox.interface import Sandbox
from etude.sandbox.template import Template

Report = Callable[[str], None]
_LOOK_S = 0.2
_MOST_IDLE = 32
"""Templates whose indexes stay open though no session uses them: each has files open and mapped."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How far a build is."""

    stage: str
    """grep, `semantic: cut` or `semantic: embed`."""
    done: int
    total: int
    """Files, or chunks."""


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
        self._trees: dict[str, _TemplateIndex] = {}
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
        return WorkspaceSearch(sandbox, self._index(template), lambda: self._release(digest))

    async def ready(
        self, template: Template, progress: Callable[[IndexProgress], None] | None = None
    ) -> None:
        """Waits until the template's indexes are built. Raises what the build raised."""
        await self._index(template).ready(progress)

    async def close(self) -> None:
        """Stops all building. What is built stays on disk."""
        trees, self._trees = self._trees, {}
        for index in trees.values():
            await index.close()
        await asyncio.gather(*self._closing)

    def _index(self, template: Template) -> _TemplateIndex:
        index = self._trees.pop(template.digest, None)
        if index is None:
            index = _TemplateIndex(template, self._state, self._embedder, self._report)
        self._trees[template.digest] = index
        return index

    def _release(self, digest: str) -> None:
        self._num_users -= Counter([digest])
        idle = [
            one for one, index in self._trees.items() if not self._num_users[one] and not index.is_building
        ]
        for one in idle[: max(0, len(idle) - self._most_idle)]:
            self._closing.start(self._trees.pop(one).close())


class _TemplateIndex:
    """Implements `Overlays`: nothing, until the indexes of its template can be asked."""

    def __init__(
        self, template: Template, state: Path, embedder: semantic.Embedder | None, report: Report
    ) -> None:
        """Opens what was built before, and builds the rest in the background."""
        self._grep: grep.GrepIndex | None = None
        self._semantic: semantic.SemanticIndex | None = None
        self._report = report
        self._progress: Callable[[IndexProgress], None] = lambda progress: None
        self._building = start_watched(self._build(template, state, embedder), self._failed)

    @property
    def is_building(self) -> bool:
        return not self._building.done()

    def grep_overlay(self) -> grep.Overlay | None:
        return None if self._grep is None else self._grep.overlay()

    def semantic_overlay(self) -> semantic.Overlay | None:
        return None if self._semantic is None else self._semantic.overlay()

    async def ready(self, progress: Callable[[IndexProgress], None] | None) -> None:
        self._progress = progress or self._progress
        await asyncio.shield(self._building)

    async def close(self) -> None:
        await end_tasks(self._building)
        if self._semantic is not None:
            await self._semantic.close()
            self._semantic = None

    async def _build(self, template: Template, state: Path, embedder: semantic.Embedder | None) -> None:
        root = await asyncio.to_thread(lay_out, template, state / "trees")
        self._grep = await self._built_grep(root, state / "grep", template.digest)
        self._semantic = await semantic.SemanticIndex.open(state / "semantic", root, embedder)
        await self._semantic.update(
            lambda now: self._progress(IndexProgress(f"semantic: {now.stage}", now.done, now.total))
        )

    async def _built_grep(self, root: Path, folder: Path, digest: str) -> grep.GrepIndex:
        while True:
            with contextlib.suppress(StoreError):
                return grep.GrepIndex.open(folder / digest, key=digest)
            try:
                return await grep.GrepIndex.build(
                    root,
                    folder / digest,
                    key=digest,
                    progress=lambda now: self._progress(IndexProgress("grep", now.done_files, now.num_files)),
                )
            except grep.IndexBusyError:  # another process builds the same
                await asyncio.sleep(_LOOK_S)

    def _failed(self, error: BaseException) -> None:
        self._report(f"no {'code' if self._grep is None else 'whole code'} index: {error}")


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
