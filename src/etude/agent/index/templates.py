"""Code indexes of sandbox templates: each is built once, in the background, on its first use."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.agent.index import grep, semantic
from etude.agent.index.workspace import MOST_BYTES, WorkspaceSearch
from etude.errors import InfrastructureError, ResourceError, StoreError
from etude.kit.durable import DRAFTS, whole_directory
from etude.kit.leftovers import sweep
from etude.kit.tasks import Tasks, end_tasks, finish_in_thread, start_watched
from etude.sandbox.interface import Sandbox
from etude.sandbox.template import Template

Report = Callable[[str], None]
MakeSandbox = Callable[[], Awaitable[Sandbox]]
"""Makes a fresh sandbox of the template; the caller closes it."""
_DEPTH = 100
_FILES_AT_ONCE = 64
_MOST_IDLE = 32
"""Unused indexes that are kept open: each has files open and mapped."""


class TemplateIndexes:
    """Code indexes by template, for all sessions of one process. For one event loop.

    A template's files are laid out once below `state`, so that no session's edits reach the indexed files;
    those of an image are read from a sandbox. A failed build is reported once, and its sessions search
    through their sandboxes. The least recently used idle indexes are closed, and reopened on their next use.
    """

    def __init__(
        self,
        state: Path,
        embedder: semantic.Embedder | None,
        report: Report = lambda words: None,
        *,
        searches: bool = True,
        waits: bool = False,
        scratch: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        """`searches`: whether there is semantic search. `waits`: whether a semantic search waits for the
        build, so that its hits do not depend on timing; a failed build is then retried for the next session,
        and searching raises InfrastructureError. `scratch`: temporary directory that holds `state`, removed
        by `close`; indexes that are closed are then deleted from disk."""
        self._waits = waits
        self.state, self.embedder, self.report = state, embedder, report
        self.searches, self._scratch = searches, scratch
        self._trees: dict[str, _TemplateIndex] = {}
        """By the template's digest, most recently used last."""
        self._num_users: Counter[str] = Counter()
        self.closing = Tasks()
        """Closing of idle indexes, in progress."""

    def search(
        self, template: Template, sandbox: Sandbox, make: MakeSandbox | None = None
    ) -> WorkspaceSearch:
        """A view for a session whose sandbox started from `template`, until it is closed. Returns at once.
        `make`: needed for a template with an image."""
        digest = template.digest
        self._num_users[digest] += 1
        index = self._index(template, make)
        wait = index.ready_or_failed if self._waits else None
        return WorkspaceSearch(
            sandbox, index.grep_overlay, index.semantic_overlay, lambda: self._release(digest), wait
        )

    async def close(self) -> None:
        """Stops all builds. Finished indexes stay on disk, unless `scratch` holds them."""
        trees, self._trees = self._trees, {}
        for index in trees.values():
            await index.close()
        await asyncio.gather(*self.closing)
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.cleanup)

    def _index(self, template: Template, make: MakeSandbox | None = None) -> _TemplateIndex:
        index = self._trees.pop(template.digest, None)
        if index is None or (self._waits and index.has_failed):
            index = _TemplateIndex(template, self, make)
        self._trees[template.digest] = index
        return index

    def _release(self, digest: str) -> None:
        self._num_users -= Counter([digest])
        idle = [
            key for key, index in self._trees.items() if not self._num_users[key] and not index.is_building
        ]
        for key in idle[: max(0, len(idle) - _MOST_IDLE)]:
            self.closing.start(self._trees.pop(key).close(delete=self._scratch is not None))


class _TemplateIndex:
    """The indexes of one template; an overlay is None until its index is built."""

    def __init__(self, template: Template, owner: TemplateIndexes, make: MakeSandbox | None) -> None:
        """Opens indexes built before, and builds the others in the background."""
        self._template, self._owner, self._make = template, owner, make
        self._grep: grep.GrepIndex | None = None
        self._semantic: semantic.SemanticIndex | None = None
        self._building = start_watched(self._build(), self._failed)

    @property
    def is_building(self) -> bool:
        return not self._building.done()

    @property
    def has_failed(self) -> bool:
        building = self._building
        return building.done() and not building.cancelled() and building.exception() is not None

    def grep_overlay(self) -> grep.Overlay | None:
        return None if self._grep is None else self._grep.overlay()

    def semantic_overlay(self) -> semantic.Overlay | None:
        return None if self._semantic is None else self._semantic.overlay()

    async def ready_or_failed(self) -> None:
        """Waits for the build. Raises InfrastructureError if it has failed."""
        try:
            await asyncio.shield(self._building)
        except Exception as error:
            raise InfrastructureError(
                f"the code index could not be built: {error}", field="agent.index"
            ) from error

    async def close(self, delete: bool = False) -> None:
        """`delete`: also removes the indexes from disk, but not vectors, which other templates may share."""
        await end_tasks(self._building)
        if self._semantic is not None:
            if delete:
                await self._semantic.delete_entries()
            await self._semantic.close()
            self._semantic = None
        if delete:
            for name in ("trees", "grep"):
                folder = self._owner.state / name / self._template.digest
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _build(self) -> None:
        owner, digest = self._owner, self._template.digest
        await asyncio.gather(*owner.closing)  # the same template's index may be among them
        root, folder = await self._laid_out(owner.state / "trees"), owner.state / "grep" / digest
        try:
            self._grep = grep.GrepIndex.open(folder, key=digest)
        except StoreError:
            self._grep = await grep.GrepIndex.build(root, folder, key=digest)
        if not owner.searches:
            return
        self._semantic = await semantic.SemanticIndex.open(owner.state / "semantic", root, owner.embedder)
        await self._semantic.update()

    async def _laid_out(self, directory: Path) -> Path:
        if self._template.image is None:
            # Waits for the thread: it could otherwise outlive the build and write after clean-up.
            return await finish_in_thread(lay_out, self._template, directory)
        if self._make is None:
            raise ResourceError("the files of an image can only be read in a sandbox", field="agent.index")
        async with await self._make() as sandbox:
            return await lay_out_from(sandbox, self._template, directory)

    def _failed(self, error: BaseException) -> None:
        self._owner.report(f"no {'code' if self._grep is None else 'complete code'} index: {error}")


def lay_out(template: Template, directory: Path) -> Path:
    """Writes the template's files below `directory`, all or nothing; returns their root. Raises OSError."""
    target = directory / template.digest
    directory.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return target
    sweep(directory, DRAFTS)
    with whole_directory(target, keep=target.exists, sync=False) as draft:
        for path, content in template.contents.items():
            _write(draft / path, content)
    return target


async def lay_out_from(sandbox: Sandbox, template: Template, directory: Path) -> Path:
    """The same for the files of a fresh sandbox of the template, as far as searches cover them. Raises as
    `Files.read`, and OSError."""
    target = directory / template.digest
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    if target.exists():
        return target
    listed = await sandbox.files.list(".", _DEPTH)
    paths = [entry.path for entry in listed if entry.kind == "file" and entry.size_bytes <= MOST_BYTES]
    paths = [path for path in paths if not any(name.startswith(".") for name in path.split("/"))]
    with whole_directory(target, keep=target.exists, sync=False) as draft:
        for start in range(0, len(paths), _FILES_AT_ONCE):
            batch = paths[start : start + _FILES_AT_ONCE]
            for path, content in zip(batch, await sandbox.files.read_many(batch, MOST_BYTES), strict=True):
                if isinstance(content, bytes):  # else it was removed, or may not be read
                    await finish_in_thread(_write, draft / path, content)
    return target


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
