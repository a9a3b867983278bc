"""A sandbox that mirrors a tree: what the person changes goes in, what the agent changes comes out.

Three states are kept apart: `disk`, the tree as it was last seen; `box`, the sandbox as it was last seen; and
what each of them is now. A file that the person changed since it was last seen is never overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from etude.agent.tools.state import is_harness_path
from etude.controller.agent.changes import FileChange, TurnChange
from etude.controller.agent.trees import Tree
from etude.errors import AgentError, SandboxError, UserError
from etude.sandbox.interface import Sandbox

CHANGED_MEANWHILE = "it was changed meanwhile by someone else"


@dataclass(slots=True, eq=False)
class Mirror:
    """One sandbox and one tree. One call at a time."""

    tree: Tree
    writes: bool = True
    """Whether changes go to the tree; else they stay in the sandbox."""
    disk: dict[str, bytes] = field(default_factory=dict[str, bytes])
    box: dict[str, bytes] = field(default_factory=dict[str, bytes])
    template: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """What the sandbox was made from."""
    sandbox: Sandbox | None = None

    async def load(self) -> None:
        """Reads the tree for a sandbox that is to be made."""
        self.disk = dict(await self.tree.scan())
        self.box = dict(self.disk)

    def mount(self, sandbox: Sandbox) -> None:
        """Takes a new sandbox into use, made from `box`."""
        self.sandbox = sandbox
        self.template = dict(self.box)

    async def pull(self) -> list[str]:
        """Brings into the sandbox what the person changed since the tree was last seen; the paths."""
        now = await self.tree.scan()
        changed = sorted(
            path for path in now.keys() | self.disk.keys() if now.get(path) != self.disk.get(path)
        )
        for path in changed:
            await self._take_in(path, now.get(path))
        return changed

    async def refresh(self, paths: Iterable[str]) -> None:
        """As `pull`, for a few files that are about to be used."""
        for path in paths:
            known = self.disk.get(path)
            if known is None and path in self.box:
                continue  # the agent's own; should the person make one of that name, neither is overwritten
            now = await self.tree.read(path)
            # What was left out at first, secrets that git ignores among it, does not come in by its name.
            if now != known and (known is not None or not await self.tree.unwanted([path])):
                await self._take_in(path, now)

    async def changes(self) -> tuple[FileChange, ...]:
        """What changed in the sandbox since it was last seen. Raises AgentError for too much."""
        assert self.sandbox is not None
        diff = await self.sandbox.diff()
        kept = {path for path in diff if not is_harness_path(path) and _is_text(path)}
        kept -= await self.tree.unwanted(kept - self.box.keys())
        now = {path: data for path, data in self.template.items() if path not in diff}
        now |= {path: data for path in kept if (data := diff[path]) is not None}
        return tuple(
            FileChange(path, self.box.get(path), now.get(path))
            for path in sorted(now.keys() | self.box.keys())
            if now.get(path) != self.box.get(path)
        )

    async def apply(self, files: Iterable[FileChange]) -> dict[str, str]:
        """Takes changes of the sandbox over, into the tree if it is written to; what was not, and why."""
        kept_back: dict[str, str] = {}
        for file in files:
            _put(self.box, file.path, file.after)
            if self.writes and (why := await self.write(file.path, file.after)):
                kept_back[file.path] = why
        return kept_back

    async def roll_forward(self, change: TurnChange) -> None:
        """Does again, before there is a sandbox, what a recorded turn did, where that is not there yet."""
        for file in change.files:
            if self.box.get(file.path) == file.before:
                _put(self.box, file.path, file.after)
                if change.written:
                    await self.write(file.path, file.after)

    async def write(self, path: str, after: bytes | None) -> str:
        """Writes one file to the tree unless the person changed it; why not, or ""."""
        known = self.disk.get(path)
        if known == after:
            return ""
        try:
            if await self.tree.read(path) != known:
                return CHANGED_MEANWHILE
            await (self.tree.remove(path) if after is None else self.tree.write(path, after))
        except UserError as error:
            return error.message
        _put(self.disk, path, after)
        return ""

    async def take_back(self, files: Iterable[FileChange]) -> dict[str, str]:
        """Undoes changes in the sandbox and in the tree; what could not be undone, and why."""
        kept_back: dict[str, str] = {}
        for file in files:
            path = file.path
            if self.box.get(path) != file.after:
                kept_back[path] = CHANGED_MEANWHILE
                continue
            if self.disk.get(path) == file.after and (why := await self.write(path, file.before)):
                kept_back[path] = why
                continue
            await self._write_box(path, file.before)
        return kept_back

    async def _take_in(self, path: str, data: bytes | None) -> None:
        _put(self.disk, path, data)
        await self._write_box(path, data)

    async def _write_box(self, path: str, data: bytes | None) -> None:
        """Writes one file into the sandbox."""
        _put(self.box, path, data)
        if self.sandbox is None:
            return
        try:
            if data is not None:
                await self.sandbox.files.write(path, data)
            else:
                await self.sandbox.files.remove(path)
        except AgentError as error:
            if data is not None:
                # A place that the agent has made a directory or a link: the person's file cannot go there.
                raise SandboxError("a file of yours cannot be put into the sandbox", field=path) from error


def _put(files: dict[str, bytes], path: str, data: bytes | None) -> None:
    if data is None:
        files.pop(path, None)
    else:
        files[path] = data


def _is_text(path: str) -> bool:
    """Whether a path may be written down: the agent may have made names that are no text."""
    return path.isprintable()
