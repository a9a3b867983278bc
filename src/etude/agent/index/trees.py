"""The code index of one tree: built once in the background, shared by all sessions that start from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etude.agent.index import grep, semantic
from etude.agent.index.workspace import WorkspaceSearch
from etude.errors import StoreError
from etude.kit.tasks import end_tasks
from etude.sandbox.interface import Sandbox

_GREP, _SEMANTIC = "grep", "semantic"
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How far a build is."""

    stage: str
    """grep, `semantic: cut` or `semantic: embed`."""
    done: int
    total: int
    """Files, or chunks."""


class TreeIndex:
    """Instant grep and semantic search over the files below a directory that does not change.

    `search(sandbox)` gives a session's view; before the build is complete it answers from what is there.
    """

    def __init__(self, root: Path, state: Path, key: str, embedder: semantic.Embedder | None) -> None:
        """`key` names the content (a commit, a template's digest). `state`: where indexes are kept, for many
        trees. Nothing is read yet."""
        self._root = root
        self._state = state
        self._key = key
        self._embedder = embedder
        self._grep: grep.GrepIndex | None = None
        self._semantic: semantic.SemanticIndex | None = None
        self._building: asyncio.Task[None] | None = None

    async def start(self, progress: Callable[[IndexProgress], None] | None = None) -> None:
        """Opens what was built before and builds the rest in the background.

        Raises StoreError or ResourceError where no index can be kept at all.
        """
        folder = self._state / _SEMANTIC
        tree = semantic.DirectoryTree(self._root)
        self._semantic = await semantic.SemanticIndex.open(folder, tree, self._embedder)
        with contextlib.suppress(StoreError):
            self._grep = grep.GrepIndex.open(self._grep_folder, key=self._grep_key)
        self._building = asyncio.create_task(self._build(progress or _ignore))

    @property
    def is_building(self) -> bool:
        """Whether something is not built yet, and still may be."""
        return self._building is not None and not self._building.done()

    @property
    def _grep_key(self) -> str:
        return grep.index_key(self._key, no_ignore=True)

    @property
    def _grep_folder(self) -> Path:
        return self._state / _GREP / self._key

    async def ready(self) -> None:
        """Waits until everything is built. Raises what the build raised."""
        assert self._building is not None, "not started"
        await asyncio.shield(self._building)

    def search(self, sandbox: Sandbox) -> WorkspaceSearch:
        """A view for one session, whose sandbox started from this tree."""
        return WorkspaceSearch(sandbox, self)

    def grep_overlay(self) -> grep.Overlay | None:
        """See Overlays."""
        return None if self._grep is None else self._grep.overlay()

    def semantic_overlay(self) -> semantic.Overlay | None:
        """See Overlays."""
        return None if self._semantic is None else self._semantic.overlay()

    async def close(self) -> None:
        """Stops building, and closes the store. What is built so far is kept. Idempotent."""
        building, self._building = self._building, None
        if building is not None:
            await end_tasks(building)
        if self._semantic is not None:
            await self._semantic.close()
            self._semantic = None

    async def _build(self, progress: Callable[[IndexProgress], None]) -> None:
        while self._grep is None:
            try:
                self._grep = await self._build_grep(progress)
            except grep.IndexBusyError:  # another process builds the same
                await asyncio.sleep(_LOOK_S)
                with contextlib.suppress(StoreError):
                    self._grep = grep.GrepIndex.open(self._grep_folder, key=self._grep_key)
        assert self._semantic is not None
        await self._semantic.update(
            lambda told: progress(IndexProgress(f"{_SEMANTIC}: {told.stage}", told.done, told.total))
        )

    async def _build_grep(self, progress: Callable[[IndexProgress], None]) -> grep.GrepIndex:
        self._grep_folder.parent.mkdir(parents=True, exist_ok=True)
        return await grep.GrepIndex.build(
            self._root,
            self._grep_folder,
            key=self._grep_key,
            no_ignore=True,
            progress=lambda told: progress(IndexProgress(_GREP, told.done_files, told.num_files)),
        )


def _ignore(progress: IndexProgress) -> None:
    pass
