"""Keeps a sandbox and a tree in sync: the person's changes go in, the agent's changes come out.

Three states are distinguished: `disk`, the tree as last read; `box`, the sandbox as last read; and their
current contents. A file that the person changed since it was last read is never overwritten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from etude.agent.tools.state import HARNESS_DIRECTORY, is_harness_path
from etude.controller.agent.changes import FileChange, TurnChange
from etude.controller.agent.trees import DirectoryTree, is_left_out, is_test
from etude.errors import AgentError, SandboxError, UserError
from etude.sandbox.errors import PathKindError
from etude.sandbox.interface import Sandbox
from etude.sandbox.template import Image, Template

CHANGED_MEANWHILE = "it was changed meanwhile by someone else"
EXISTS = "a file of yours is there that the agent did not have"
IGNORED = "git ignores it"
LEFT_OUT = "such files are never copied into or out of the sandbox"
NO_TEXT = "its name is not valid text"


@dataclass(slots=True, eq=False)
class Mirror:
    """Synchronises one sandbox and one tree. One call at a time."""

    tree: DirectoryTree
    writes: bool = True
    """Whether changes go to the tree; else they stay in the sandbox."""
    disk: dict[str, bytes] = field(default_factory=dict[str, bytes])
    box: dict[str, bytes] = field(default_factory=dict[str, bytes])
    template: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Files that the sandbox was made from."""
    sandbox: Sandbox | None = None
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Paths whose last change could not be written to the tree, and why."""
    staying: dict[str, str] = field(default_factory=dict[str, str])
    """Paths that differ in the sandbox and are never copied to the tree, and why."""
    byproducts: tuple[str, ...] = ()
    """Directories ignored by git in which commands created files."""

    @property
    def kept_back(self) -> dict[str, str]:
        """All paths whose changes are in the sandbox only, although the tree is written to, and why."""
        return {**self.staying, **self.refused}

    async def load(self) -> None:
        """Reads the tree, for a new sandbox."""
        self.disk = await self.tree.scan()
        self.box = dict(self.disk)

    def make_template(self, more: Mapping[str, bytes], image: Image | None) -> Template:
        """The template of a new sandbox; `more`: files of the harness."""
        return Template({**self.box, **more}, "repository", image)

    def content(self, path: str) -> bytes:
        """Contents of a file; empty where it does not exist."""
        return self.box.get(path, b"")

    def test_paths(self) -> tuple[str, ...]:
        """Paths of all tests."""
        return tuple(sorted(path for path in self.box if is_test(path)))

    def originals(self, before: Mapping[str, bytes | None]) -> Mapping[str, bytes | None] | None:
        """Contents of files when the session began; `before`: of those that have changed since."""
        return {**self.box, **before}

    def record_originals(self, paths: Iterable[str]) -> tuple[FileChange, ...]:
        """Called before a call writes files: returns those whose originals must be saved first."""
        return ()

    def mount(self, sandbox: Sandbox) -> None:
        """Attaches a new sandbox, made from `box`."""
        self.sandbox = sandbox
        self.template = dict(self.box)

    async def pull(self) -> list[str]:
        """Copies the person's changes since the tree was last read into the sandbox; returns the paths."""
        now = await self.tree.scan()
        changed = sorted(
            path for path in now.keys() | self.disk.keys() if now.get(path) != self.disk.get(path)
        )
        for path in changed:
            await self._pull_file(path, now.get(path))
        return changed

    async def refresh(self, paths: Iterable[str]) -> None:
        """As `pull`, for a few files that are about to be used."""
        for path in paths:
            known = self.disk.get(path)
            if known is None and path in self.box:
                continue  # the agent's own; if the person creates one of that name, neither is overwritten
            now = await self.tree.read(path)
            # Files left out at first, such as secrets that git ignores, do not enter when a call names them.
            if now != known and (known is not None or not await self.tree.unwanted([path])):
                await self._pull_file(path, now)

    async def changes(self, named: Collection[str] = ()) -> tuple[FileChange, ...]:
        """The sandbox's changes since it was last read; sets `staying` to those that are never copied.

        `named`: the files that the agent's tools wrote by name. Raises AgentError for too large a diff.
        """
        assert self.sandbox is not None
        diff = await self.sandbox.diff(HARNESS_DIRECTORY)
        mine = {path for path in diff if not is_harness_path(path)}
        kept = {path for path in mine if _is_text(path)}
        unwanted = await self.tree.unwanted(kept - self.box.keys())
        kept -= unwanted
        self.staying = {ascii(path)[1:-1]: NO_TEXT for path in mine if not _is_text(path)}
        self.staying |= await self._unwanted({path for path in unwanted if diff[path] is not None}, named)
        now = {path: data for path, data in self.template.items() if path not in diff}
        now |= {path: data for path in kept if (data := diff[path]) is not None}
        return tuple(
            FileChange(path, self.box.get(path), now.get(path))
            for path in sorted(now.keys() | self.box.keys())
            if now.get(path) != self.box.get(path)
        )

    async def _unwanted(self, paths: set[str], named: Collection[str]) -> dict[str, str]:
        """Why these new files stay in the sandbox. Unless a tool wrote them by name, caches are not listed,
        and of files in a directory that git ignores (builds) only the directory is, in `byproducts`."""
        left_out = {path for path in paths if is_left_out(path)}
        folders = {path: f"{path.rpartition('/')[0]}/" for path in paths - left_out if "/" in path}
        ignored = await self.tree.unwanted(set(folders.values()))
        byproducts = {path for path, folder in folders.items() if folder in ignored and path not in named}
        self.byproducts = tuple(sorted({folders[path].split("/")[0] for path in byproducts}))
        staying = dict.fromkeys(paths - left_out - byproducts, IGNORED)
        return staying | {path: LEFT_OUT for path in left_out if path in named}

    async def apply(self, files: Iterable[FileChange]) -> dict[str, str]:
        """Applies changes of the sandbox, to the tree if `writes`; returns what was not written, and why."""
        kept_back: dict[str, str] = {}
        for file in files:
            _put(self.box, file.path, file.after)
            if self.writes and (why := await self.write(file.path, file.after)):
                kept_back[file.path] = why
        return kept_back

    async def roll_forward(self, change: TurnChange) -> None:
        """Repeats the changes of a recorded turn, before a sandbox exists, where they are missing."""
        for file in change.files:
            if self.box.get(file.path) == file.before:
                _put(self.box, file.path, file.after)
                if change.written:
                    await self.write(file.path, file.after)

    async def write(self, path: str, after: bytes | None) -> str:
        """Writes one file to the tree unless the person changed it; returns why not, or ""."""
        known = self.disk.get(path)
        why = "" if known == after else await self._try_to_write(path, known, after)
        if why:
            self.refused[path] = why
        else:
            self.refused.pop(path, None)
            _put(self.disk, path, after)
        return why

    async def _try_to_write(self, path: str, known: bytes | None, after: bytes | None) -> str:
        try:
            current = await self.tree.read(path)
            if current == after and (after is not None or not await self.tree.occupied(path)):
                return ""  # the person, or an earlier run, has done the same
            if current != known:
                return CHANGED_MEANWHILE if known is not None else await self._why_unknown(path)
            if known is None and await self.tree.occupied(path):
                return await self._why_unknown(path)
            await (self.tree.remove(path) if after is None else self.tree.write(path, after))
        except UserError as error:
            return error.message
        return ""

    async def _why_unknown(self, path: str) -> str:
        """Why an existing file was never read."""
        return IGNORED if await self.tree.unwanted([path]) else EXISTS

    async def undo(self, files: Iterable[FileChange]) -> dict[str, str]:
        """Undoes changes in the sandbox and in the tree; returns what could not be undone, and why."""
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

    async def _pull_file(self, path: str, data: bytes | None) -> None:
        _put(self.disk, path, data)
        await self._write_box(path, data)

    async def _write_box(self, path: str, data: bytes | None) -> None:
        """Writes one file into the sandbox."""
        _put(self.box, path, data)
        if self.sandbox is None:
            return
        files = self.sandbox.files
        try:
            await (files.remove(path) if data is None else files.write(path, data))
        except AgentError as error:
            if data is not None:
                await self._write_anew(path, data, error)

    async def _write_anew(self, path: str, data: bytes, refusal: AgentError) -> None:
        """Replaces a file that could not be written: the agent may have made it read-only."""
        assert self.sandbox is not None
        try:
            if not isinstance(refusal, PathKindError):
                await self.sandbox.files.remove(path)
                await self.sandbox.files.write(path, data)
                return
        except AgentError as error:
            refusal = error
        # The agent has made the path a directory or a link: the person's file cannot be written there.
        raise SandboxError("your file cannot be copied into the sandbox", field=path) from refusal


def _put(files: dict[str, bytes], path: str, data: bytes | None) -> None:
    if data is None:
        files.pop(path, None)
    else:
        files[path] = data


def _is_text(path: str) -> bool:
    """Whether a path can be recorded as text: the agent may create any names."""
    return path.isprintable()
