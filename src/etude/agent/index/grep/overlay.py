"""Edits on top of a shared index: files written, removed and renamed since it was made.

Changed files stand in a mirror (see mirror.py) that ripgrep searches together with the index's candidates;
the index's own files at changed paths no longer count. Many overlays, one per session, share one index.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from etude.agent.index.grep.mirror import Mirror
from etude.agent.index.grep.query import GrepQuery, GrepResult
from etude.agent.index.grep.search import Searcher
from etude.agent.index.grep.tree import GIT_EXCLUDE, is_rule_path, list_files, scan, stat_file
from etude.errors import ConfigError

__all__ = ["Overlay", "above_paths"]


class Overlay:
    """The edits of one session. Not for several threads. Close it: it keeps temporary files."""

    def __init__(self, searcher: Searcher, *, live: bool = False) -> None:
        """`live`: the tree on disk itself has the changes, which `touch` reports."""
        self._searcher = searcher
        self._base = searcher.base
        self.live = live
        self._held: set[bytes] = set()
        self._gone: set[bytes] = set()
        self._gone_trees: set[bytes] = set()
        self._ignored: frozenset[bytes] = frozenset()
        self._changed_rules: set[bytes] = set()
        self._arrived: set[bytes] = set()
        self._mirror: Mirror | None = None
        self._lock = asyncio.Lock()
        self._rules_edited = False
        self._searches = 0
        self._closed = False

    @property
    def mirror(self) -> Path | None:
        """See `Changes`."""
        return self._mirror.path if self._mirror is not None and self._held else None

    @property
    def changed(self) -> frozenset[str]:
        """Paths that differ from the index; of removed directories the directory."""
        return frozenset(os.fsdecode(path) for path in self._held | self._gone | self._gone_trees)

    def masks(self, path: bytes) -> bool:
        """See `Changes`."""
        return path in self._ignored or self._removed(path)

    def holds(self, path: bytes) -> bool:
        """See `Changes`."""
        return path in self._held

    def write(self, path: str, content: bytes) -> None:
        """The file at `path` now has this content. Raises ConfigError for a path outside."""
        name = _checked(path)
        self._make_way(name)
        self._room().put(name, content)
        self._held.add(name)

    def remove(self, path: str) -> None:
        """There is nothing at `path` any more, neither a file nor a directory."""
        name = _checked(path)
        self._clear(name)
        self._gone_trees.add(name)

    def rename(self, old: str, new: str) -> None:
        """The file or directory `old` is now at `new`. Raises ConfigError if there is none."""
        source, target = _checked(old), _checked(new)
        if (target + b"/").startswith(source + b"/"):
            raise ConfigError(
                "cannot be moved into itself", field="path", received=new, fix="name another place"
            )
        held = [path for path in self._held if (path + b"/").startswith(source + b"/")]
        untouched = [path for path in self._on_disk(source) if not self._removed(path)]
        if not held and not untouched:
            raise ConfigError(
                "does not exist", field="path", received=old, fix="name a file or directory of the tree"
            )
        self._clear(target)
        for path in untouched:
            self._place(target + path[len(source) :], self._base.root / os.fsdecode(path))
        for path in held:
            moved = target + path[len(source) :]
            self._make_way(moved)
            self._room().move(path, moved)
            self._held.add(moved)
        self.remove(old)

    def touch(self, path: str) -> None:
        """What is on disk at `path` changed: a file, a directory with all below it, or nothing any more."""
        name = _checked(path)
        disk = self._base.root / os.fsdecode(name)
        if name.endswith(b"/.git") or name == b".git":
            self._note_rule(name)
            self._room().remove(name)
            if disk.exists():
                self._room().link(name)
        elif disk.is_dir() and not disk.is_symlink():
            self._clear(name)
            self._gone_trees.add(name)
            self._arrived.add(name)
        elif stat_file(os.fsencode(self._base.root), name) is not None:
            self._place(name, disk)
        else:
            self.remove(path)

    async def search(self, query: GrepQuery) -> GrepResult:
        """As `GrepIndex.search`, on the tree with these edits."""
        self._searches += 1
        try:
            await self.settle()
            if self._rules_edited and not self.live and any(not glob.startswith("!") for glob in query.globs):
                return await self._search_links(query)
            return await self._searcher.search(query, self)
        finally:
            self._searches -= 1
            if self._closed and not self._searches:
                self.close()

    async def settle(self, entered: Callable[[bytes], None] = lambda directory: None) -> None:
        """Works out what changed directories and ignore rules mean; searches do it themselves.

        `entered` hears of each directory that ripgrep now enters, before the files in it are listed.
        """
        async with self._lock:
            while self._arrived or self._changed_rules:
                if self._arrived:
                    await self._enter(entered)
                if self._changed_rules:
                    await self._apply_rules(entered)

    def close(self) -> None:
        """Removes its files, once the last search has ended. It is of no use afterwards."""
        self._closed = True
        if self._searches:
            return
        if self._mirror is not None:
            self._mirror.close()
        self._mirror = None
        self._held.clear()

    def __enter__(self) -> Overlay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _room(self) -> Mirror:
        if self._mirror is None:
            self._mirror = Mirror(self._base.root, self._standing_rules())
        return self._mirror

    def _standing_rules(self) -> list[bytes]:
        return [rule for rule in self._base.tree.rules if not self._removed(rule)]

    def _place(self, path: bytes, source: Path) -> None:
        """The file at `path` is `source` on disk."""
        self._make_way(path)
        self._room().link_to(path, source)
        self._held.add(path)

    def _make_way(self, path: bytes) -> None:
        """A file will stand at `path`: nothing else does, and what leads to it are directories."""
        self._clear(path)
        if path in self._base.tree.directories:
            self._gone_trees.add(path)
        for above in above_paths(path):
            self._gone.add(above)
            if above in self._held:
                self._held.discard(above)
                self._room().remove(above)

    def _clear(self, path: bytes) -> None:
        """Nothing of the base or the mirror counts at `path` or below it in the mirror."""
        self._gone.add(path)
        self._held.discard(path)
        below = path + b"/"
        if self._mirror is not None:
            if self._mirror.is_directory(path):
                for held in [held for held in self._held if held.startswith(below)]:
                    self._held.discard(held)
                    self._note_rule(held)
            self._mirror.remove(path)
        if path in self._base.tree.directories:
            for rule in self._base.tree.rules:
                if rule.startswith(below):
                    self._note_rule(rule)
        self._note_rule(path)

    def _note_rule(self, path: bytes) -> None:
        if is_rule_path(path):
            self._room()
            self._changed_rules.add(path)

    def _removed(self, path: bytes) -> bool:
        """Whether an edit took the base's file at `path` away or put another one there."""
        if path in self._gone:
            return True
        trees = self._gone_trees
        return bool(trees) and (path in trees or any(above in trees for above in above_paths(path)))

    def _on_disk(self, path: bytes) -> list[bytes]:
        """Regular files of the tree at or below `path`."""
        root = os.fsencode(self._base.root)
        if stat_file(root, path) is not None:
            return [path]
        found: list[bytes] = []
        for directory, _, names in os.walk(root + b"/" + path):
            relative = directory[len(root) + 1 :]
            found += [
                relative + b"/" + name
                for name in names
                if stat_file(root, relative + b"/" + name) is not None
            ]
        return found

    async def _enter(self, entered: Callable[[bytes], None]) -> None:
        """Takes in directories that arrived, level by level, without those that ripgrep skips."""
        arrived = {path for path in self._arrived if (self._base.root / os.fsdecode(path)).is_dir()}
        self._arrived = set()
        room = self._room()
        for path in arrived:
            room.make_directory(path)
        tree = await scan(self._searcher.ripgrep, room.path, self._base.flags)
        for path in sorted(arrived & tree.directories):
            entered(path)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                for found in list((self._base.root / os.fsdecode(path)).iterdir()):
                    self.touch(f"{os.fsdecode(path)}/{found.name}")

    async def _apply_rules(self, entered: Callable[[bytes], None]) -> None:
        """Asks ripgrep anew which files count, below the directories whose ignore rules changed."""
        self._rules_edited = True
        scopes = [_scope(path) for path in self._changed_rules]
        self._changed_rules = set()
        files = await asyncio.to_thread(lambda: self._base.files)
        known = {path for path in files if _within(path, scopes)}
        ripgrep, flags = self._searcher.ripgrep, self._base.flags
        if self.live:
            tree = await scan(ripgrep, self._base.root, flags)
            for directory in tree.directories:
                entered(directory)
            visible = {path for path in tree.files if _within(path, scopes)}
        else:
            everything = await list_files(ripgrep, self._base.root, ["--hidden", "--no-ignore"])
            wanted = [path for path in everything if _within(path, scopes) and not self._removed(path)]
            visible = await self._judge(wanted)
        self._ignored = frozenset(
            {path for path in self._ignored if not _within(path, scopes)} | (known - visible)
        )
        for path in visible - known:
            if path not in self._held and not self._removed(path):
                self._room().link(path)
                self._held.add(path)

    async def _judge(self, paths: list[bytes]) -> set[bytes]:
        """Which of `paths`, files of the tree, count by the rules as edited: ripgrep's word on links."""
        async with self._linked(paths) as places:
            listed = await list_files(self._searcher.ripgrep, places.path, self._base.flags, follow=True)
        return set(listed) & set(paths)

    async def _search_links(self, query: GrepQuery) -> GrepResult:
        """Searches the whole tree as edited, by links: for globs that outrank edited ignore rules."""
        everything = await list_files(self._searcher.ripgrep, self._base.root, ["--hidden", "--no-ignore"])
        held = self._held
        untouched = [path for path in everything if path not in held and not self._removed(path)]
        async with self._linked(untouched) as places:
            for path in held:
                places.link_to(path, self._room().path / os.fsdecode(path))
            return await self._searcher.search_directory(query, places.path)

    @contextlib.asynccontextmanager
    async def _linked(self, paths: list[bytes]) -> AsyncIterator[Mirror]:
        """A directory with links to these files of the tree, among the ignore rules as edited."""
        edited = [path for path in self._held if is_rule_path(path)]
        rules, room = self._standing_rules(), self._room()

        def make() -> Mirror:
            places = Mirror(self._base.root, rules)
            for path in edited:
                places.link_to(path, room.path / os.fsdecode(path))
            places.link_many(path for path in paths if not is_rule_path(path))
            return places

        making = asyncio.ensure_future(asyncio.to_thread(make))
        try:
            yield await asyncio.shield(making)
        finally:
            await asyncio.wait([making])
            if making.exception() is None:
                await asyncio.to_thread(making.result().close)


def _checked(path: str) -> bytes:
    name = os.fsencode(path)
    parts = name.split(b"/")
    if b".." in parts or b"" in parts or b"." in parts or b"\0" in name:
        raise ConfigError(
            "is no path below the root",
            field="path",
            received=path,
            fix="give names joined by single slashes",
        )
    return name


def above_paths(path: bytes) -> list[bytes]:
    """The directories that lead to `path`, itself not among them."""
    found: list[bytes] = []
    at = path.find(b"/")
    while at >= 0:
        found.append(path[:at])
        at = path.find(b"/", at + 1)
    return found


def _scope(rule: bytes) -> bytes:
    """The directory that an ignore rule's file governs."""
    if rule == GIT_EXCLUDE or rule.endswith(b"/" + GIT_EXCLUDE):
        return rule.removesuffix(GIT_EXCLUDE).rstrip(b"/")
    return rule.rpartition(b"/")[0]


def _within(path: bytes, scopes: list[bytes]) -> bool:
    return any(not scope or path.startswith(scope + b"/") for scope in scopes)
