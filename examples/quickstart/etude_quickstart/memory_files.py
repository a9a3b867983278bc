"""Files in a dict: the workspace of the in-memory backend and its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from etude.sandbox.answers import encode_changes
from etude.sandbox.calls import Answer
from etude.sandbox.inside import faults
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.filesystem import compile_pattern, matching_lines
from etude.sandbox.inside.frames import Header


class MemoryWorkspace:
    """A dict of path -> content. As on a disk, a directory remains after its last file is removed.

    `operations` behave as in the program inside real sandboxes (`inside.server`), and raise Fault.
    """

    def __init__(self, contents: dict[str, bytes], template: Mapping[str, bytes]) -> None:
        self.contents = contents
        self._template = template
        self._folders = {folder for path in (*template, *contents) for folder in _folders(path)}
        self.operations: dict[str, Callable[[Header, bytes], Answer]] = {
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "remove": self._remove,
            "grep": self._grep,
            "diff": self._diff,
        }

    # Methods of `testrunner.Source`, for test runs

    def read(self, path: str) -> str | None:
        """The text of a module."""
        data = self.contents.get(path)
        return None if data is None else data.decode(errors="replace")

    def is_dir(self, path: str) -> bool:
        """Whether a normalised path is a directory."""
        return path == "." or path in self._folders

    def entries(self, path: str) -> list[str]:
        """Sorted names of a directory's entries."""
        prefix = path + "/" if path else ""
        names = {name[len(prefix) :].partition("/")[0] for name in self.contents if name.startswith(prefix)}
        return sorted(names)

    # Operations

    def _read(self, header: Header, payload: bytes) -> Answer:
        """Reads the first file only, as the oldest programs inside do."""
        start = header.get("offset", 0)
        return {}, self._content(header["path"])[start : start + max(0, header["limit_bytes"])]

    def _write(self, header: Header, payload: bytes) -> Answer:
        start = 0
        for name, size in header["files"]:
            data = payload[start : start + size]
            start += size
            if self.is_dir(name):
                raise Fault(*faults.IS_DIRECTORY)
            folders = _folders(name)
            if any(folder in self.contents for folder in folders):
                raise Fault(*faults.PART_IS_FILE)
            self._folders.update(folders)
            self.contents[name] = self.contents.get(name, b"") + data if header.get("append") else data
        return {}, b""

    def _list(self, header: Header, payload: bytes) -> Answer:
        name = header["path"]
        if name in self.contents:
            raise Fault(*faults.NOT_DIRECTORY)
        self._check_directory(name)
        prefix = "" if name == "." else name + "/"
        entries: list[tuple[str, str, int]] = [
            (file, "file", len(data)) for file, data in self.contents.items()
        ]
        entries += [(folder, "dir", 0) for folder in self._folders]
        below = [
            list(entry)
            for entry in sorted(entries)
            if entry[0].startswith(prefix) and entry[0].count("/", len(prefix)) < header["depth"]
        ]
        return {"entries": below}, b""

    def _remove(self, header: Header, payload: bytes) -> Answer:
        name = header["path"]
        if name == ".":
            raise Fault(*faults.ROOT_STAYS)
        if self.contents.pop(name, None) is None:
            self._check_directory(name)
            for file in [file for file in self.contents if file.startswith(name + "/")]:
                del self.contents[file]
            self._folders = {f for f in self._folders if f != name and not f.startswith(name + "/")}
        return {}, b""

    def _grep(self, header: Header, payload: bytes) -> Answer:
        name, expression = header["path"], compile_pattern(header["pattern"])
        if name not in self.contents:
            self._check_directory(name)
        matches: list[list[object]] = []
        for file in sorted(self.contents):
            below = name in (".", file) or file.startswith(name + "/")
            if not below or "__pycache__" in file.split("/"):
                continue
            for number, line in matching_lines(expression, self.contents[file]):
                matches.append([file, number, line])
                if len(matches) >= header["limit"]:
                    return {"matches": matches}, b""
        return {"matches": matches}, b""

    def _diff(self, header: Header, payload: bytes) -> Answer:
        below = f"{header['without']}/"
        now, then = (
            {path: data for path, data in files.items() if not path.startswith(below)}
            for files in (self.contents, self._template)
        )
        changed: dict[str, bytes | None] = {
            path: data for path, data in now.items() if then.get(path) != data
        }
        return encode_changes({**changed, **{path: None for path in then if path not in now}})

    def _check_directory(self, name: str) -> None:
        if not self.is_dir(name):
            blocked = any(folder in self.contents for folder in _folders(name))
            raise Fault(*(faults.PART_IS_FILE if blocked else faults.MISSING))

    def _content(self, name: str) -> bytes:
        data = self.contents.get(name)
        if data is None:
            self._check_directory(name)
            raise Fault(*faults.IS_DIRECTORY)
        return data


def _folders(path: str) -> list[str]:
    """Every directory that `path` lies in."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
