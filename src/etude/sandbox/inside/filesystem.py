"""File operations on a workspace, for the server inside a sandbox.

Paths arrive normalised (`a/b.py`, `.`). The agent's processes may change anything at any time, so every
operation opens without blocking, checks what it opened, and resolves links before it trusts a path.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from etude.sandbox.inside import faults, kernel
from etude.sandbox.inside.faults import Fault

_READ, _ENTER = stat.S_IRUSR, stat.S_IRUSR | stat.S_IXUSR


class Unlocked:
    """A context in which entered directories are made readable; at its end their modes are restored.

    The agent may remove every right from its own directories (`chmod 0 .`), which would hide all changes from
    a server without capabilities. The owner of a file may always change its mode.
    """

    def __init__(self) -> None:
        self._changed: list[tuple[str, int]] = []

    def __enter__(self) -> Unlocked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The innermost first: below a locked directory nothing can be reached.
        while self._changed:
            path, mode = self._changed.pop()
            try:
                os.chmod(path, mode)
            except OSError:
                # The agent has removed or moved it: there is nothing to restore.
                continue

    def enter(self, folder: str) -> bool:
        """Makes a directory readable and searchable; False if that is impossible."""
        if os.access(folder, os.R_OK | os.X_OK):
            return True
        try:
            mode = stat.S_IMODE(os.lstat(folder).st_mode)
            self._changed.append((folder, mode))
            os.chmod(folder, mode | _ENTER)
        except OSError:
            return False
        return True


def open_unlocked(name: str, folder: int, opening: Callable[[], int]) -> int:
    """Calls `opening`, which opens the regular file `name` of a directory; unlocks the file if needed.

    Raises OSError, PermissionError for a file of another user.
    """
    try:
        return opening()
    except PermissionError:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise
        mode = stat.S_IMODE(status.st_mode)
        try:
            os.chmod(name, mode | _READ, dir_fd=folder)
            return opening()
        finally:
            # The agent may have removed it, which must not lose the descriptor.
            with contextlib.suppress(OSError):
                os.chmod(name, mode, dir_fd=folder)


MAX_DIFF_BYTES = 32 << 20
MAX_ENTRIES = 50_000
_SMALL_BYTES = 1 << 16
"""Smaller files are read in one call."""
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Workspace:
    """The files below `root`; `template` is a descriptor of the directory with their initial contents.

    None: `root` is a directory of the host, whose initial contents are unknown.
    """

    def __init__(self, root: str, template: int | None, passed_over: Iterable[str] = ()) -> None:
        """`passed_over`: names that listings and searches skip, with everything below."""
        self.root = os.path.realpath(root)
        self._directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._template = template
        self._passed_over = frozenset(passed_over)

    def read(self, path: str, limit_bytes: int, offset: int = 0) -> bytes:
        """Up to `limit_bytes` of a regular file, from `offset` on."""
        return _read_regular(self._open_to_read(path), limit_bytes, offset)

    def write(self, path: str, data: bytes, append: bool = False) -> None:
        """Replaces, creates or appends to a file, and creates its parent directories."""
        if path == ".":
            raise Fault(*faults.IS_DIRECTORY)
        full = self._resolve(path)
        flags = _WRITE_FLAGS | (os.O_APPEND if append else os.O_TRUNC)
        try:
            descriptor = self._open(full, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            descriptor = self._open(full, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Fault(*faults.NOT_REGULAR)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        """Removes a file or a whole directory; of a link, the link and not its target."""
        if path == ".":
            raise Fault(*faults.ROOT_STAYS)
        parent, name = os.path.split(path)
        full = os.path.join(self._resolve(parent or "."), name)
        if stat.S_ISDIR(os.lstat(full).st_mode):
            shutil.rmtree(full)
        else:
            os.unlink(full)

    def list(self, path: str, depth: int) -> list[list[object]]:
        """[path, kind, size] of everything below a directory, sorted by path."""
        full = self._resolve(path)
        if not stat.S_ISDIR(os.stat(full).st_mode):
            raise Fault(*faults.NOT_DIRECTORY)
        found: list[list[object]] = []
        prefix = "" if path == "." else path + "/"
        for name, entry in _walk(full, prefix, depth, passed_over=self._passed_over):
            kind = _kind(entry)
            try:
                size = entry.stat(follow_symlinks=False).st_size if kind == "file" else 0
            except FileNotFoundError:
                continue  # removed since it was listed
            found.append([name, kind, size])
        found.sort(key=lambda row: str(row[0]))
        return found

    def grep(self, pattern: str, path: str, limit: int) -> list[list[object]]:
        """[path, line number, line] of the first `limit` matching lines.

        Unreadable files below a directory are skipped: one locked file does not hide the others.
        """
        expression = compile_pattern(pattern)
        full = self._resolve(path)
        if not stat.S_ISDIR(os.stat(full).st_mode):
            return self._matches(expression, path, limit)
        prefix = "" if path == "." else path + "/"
        matches: list[list[object]] = []
        found = _walk(full, prefix, 100, passed_over=self._passed_over)
        for name in sorted(name for name, entry in found if _kind(entry) == "file"):
            if "__pycache__" in name.split("/"):
                continue
            try:
                matches += self._matches(expression, name, limit - len(matches))
            except (PermissionError, FileNotFoundError):
                continue
            if len(matches) >= limit:
                break
        return matches

    def _matches(self, expression: re.Pattern[str], path: str, limit: int) -> list[list[object]]:
        found = matching_lines(expression, self.read(path, 8 << 20))
        return [[path, number, line] for number, line in itertools.islice(found, limit)]

    def diff(self, without: str) -> tuple[list[int | None], int, bytearray]:
        """(sizes, bytes of names, contents and names) of files that differ from the template, in one order.

        The directory `without` is skipped.

        The size of a removed file is None. Names end with NUL: the agent chose them, of any bytes, and as
        JSON they could be six times as long. They count against `MAX_DIFF_BYTES` as contents do.

        A file with the inode, size and times of the template's counts as unchanged: a program that forges
        those only hides changes of its own. Files that the agent has locked are included; unreadable files of
        another user count as unchanged. Without a template every file may differ, which is too much.
        """
        if self._template is None:
            raise Fault(*faults.DIFF_TOO_LARGE)
        sizes: list[int | None] = []
        name_bytes = 0
        names: list[bytes] = []
        carried = bytearray()
        seen: set[str] = set()
        closed = [f"{without}/"]
        with Unlocked() as unlocked:
            for path, entry in _walk(self.root, "", 1000, unlocked, closed):
                if _kind(entry) != "file":
                    continue
                try:
                    data = self._changed(path, entry, MAX_DIFF_BYTES - len(carried) - name_bytes)
                except FileNotFoundError:
                    continue  # deleted since it was listed
                seen.add(path)
                if data is not None:
                    sizes.append(len(data))
                    names.append(os.fsencode(path) + b"\0")
                    carried += data
                    name_bytes += len(names[-1])
        for path in self._template_paths():
            if path not in seen and not path.startswith(tuple(closed)):
                sizes.append(None)
                names.append(os.fsencode(path) + b"\0")
        all_names = b"".join(names)
        carried += all_names
        return sizes, len(all_names), carried

    def _changed(self, path: str, entry: os.DirEntry[str], room_bytes: int) -> bytes | None:
        """The content of a file that differs from the template's; None if it does not."""
        status = entry.stat(follow_symlinks=False)
        before = self._template_status(path)
        if before is not None and _identity(before) == _identity(status):
            return None
        if status.st_size > room_bytes:
            raise Fault(*faults.DIFF_TOO_LARGE)
        try:
            data = self._read_unlocked(path)
        except PermissionError:
            return None
        if before is not None and before.st_size == len(data) and self._template_bytes(path) == data:
            return None
        return data

    def _resolve(self, path: str) -> str:
        full = os.path.realpath(os.path.join(self.root, path))
        if full != self.root and not full.startswith(self.root + "/"):
            raise Fault(*faults.OUTSIDE)
        return full

    def _open_to_read(self, path: str) -> int:
        """Usually one call; only links with absolute targets or `..` out of the root need `_resolve`."""
        try:
            return kernel.open_beneath(self._directory, path, _READ_FLAGS)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        return self._open(self._resolve(path), _READ_FLAGS)

    def _read_unlocked(self, path: str) -> bytes:
        """Up to `MAX_DIFF_BYTES` of a regular file, even if the agent has made it unreadable."""
        parent, name = os.path.split(path)
        folder = self._open(os.path.join(self.root, parent), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = open_unlocked(name, folder, lambda: self._open_to_read(path))
        finally:
            os.close(folder)
        return _read_regular(descriptor, MAX_DIFF_BYTES)

    def _open(self, full: str, flags: int, mode: int = 0) -> int:
        """Opens a path from `_resolve`; a link put there since cannot lead outside of the root."""
        try:
            return kernel.open_beneath(self._directory, os.path.relpath(full, self.root), flags, mode)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise Fault(*faults.OUTSIDE) from error

    def _template_status(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=self._template, follow_symlinks=False)
        except OSError:
            return None

    def _template_bytes(self, path: str) -> bytes | None:
        """Content of a template's file; None if an image's file is unreadable: it counts as different."""
        try:
            descriptor = os.open(path, _READ_FLAGS, dir_fd=self._template)
        except PermissionError:
            return None
        try:
            return _read_up_to(descriptor, MAX_DIFF_BYTES)
        finally:
            os.close(descriptor)

    def _template_paths(self) -> Iterator[str]:
        for folder, _, names, _ in os.fwalk(".", dir_fd=self._template):
            for name in names:
                yield os.path.normpath(os.path.join(folder, name))


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled expression. Raises Fault with the reason if it does not compile."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise Fault("argument", f"bad regular expression: {error}") from error


def matching_lines(expression: re.Pattern[str], data: bytes) -> Iterator[tuple[int, str]]:
    """(number, line) of the matching lines of a text file; none for a file with NUL bytes."""
    if b"\0" in data:
        return
    for number, line in enumerate(data.decode(errors="replace").split("\n"), 1):
        if expression.search(line):
            yield number, line.rstrip("\r")


def _walk(
    root: str,
    prefix: str,
    depth: int,
    unlocked: Unlocked | None = None,
    closed: list[str] | None = None,
    passed_over: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(prefix + relative path, entry) of everything down to `depth` levels, except the names `passed_over`.
    Links are not followed.

    Directories below `root` that cannot be entered are skipped and added to `closed`. Also skipped are those
    removed since they were listed, and those in `closed` already.
    """
    pending = [(root, prefix, 1)] if depth > 0 else []
    count = 0
    while pending:
        folder, before, level = pending.pop()
        if closed is not None and before in closed:
            continue
        if unlocked is not None:
            unlocked.enter(folder)
        try:
            with os.scandir(folder) as listing:
                entries = list(itertools.islice(listing, MAX_ENTRIES + 1))
        except (PermissionError, FileNotFoundError) as error:
            if level == 1:
                raise
            if closed is not None and isinstance(error, PermissionError):
                closed.append(before)
            continue
        for entry in entries:
            if entry.name in passed_over:
                continue
            count += 1
            if count > MAX_ENTRIES:
                raise Fault("argument", f"more than {MAX_ENTRIES} entries: name a smaller directory")
            yield before + entry.name, entry
            if level < depth and entry.is_dir(follow_symlinks=False):
                pending.append((entry.path, before + entry.name + "/", level + 1))


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "symlink"
    if entry.is_dir(follow_symlinks=False):
        return "dir"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_regular(descriptor: int, limit_bytes: int, offset: int = 0) -> bytes:
    """Reads from a descriptor and closes it. Raises Fault for anything but a regular file."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Fault(*(faults.IS_DIRECTORY if stat.S_ISDIR(status.st_mode) else faults.NOT_REGULAR))
        if offset:
            os.lseek(descriptor, offset, os.SEEK_SET)
        elif 0 < status.st_size < min(limit_bytes, _SMALL_BYTES):
            data = os.read(descriptor, status.st_size + 1)
            if len(data) == status.st_size:
                return data  # a short read: the file ends there
            return data + _read_up_to(descriptor, limit_bytes - len(data))
        return _read_up_to(descriptor, limit_bytes)
    finally:
        os.close(descriptor)


def _read_up_to(descriptor: int, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    while limit_bytes > 0:
        part = os.read(descriptor, min(limit_bytes, 1 << 20))
        if not part:
            break
        parts.append(part)
        limit_bytes -= len(part)
    return b"".join(parts)
