"""The storage interface of weight stores: named bytes in a directory, an object store or behind a relay.

Names are relative, with `/` between parts. Writes are atomic.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol, cast

from fsspec.core import url_to_fs  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from etude.errors import EtudeError, StoreError
from etude.errors.packages import install_command
from etude.kit.durable import FULL, sync_path, write_bytes
from etude.kit.retry import Backoff, retry

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_AT_ONCE = Backoff(base_s=0.0, attempts=10)


class MissingError(StoreError):
    """There is no file of this name."""


class NotAFileError(MissingError):
    """The name is that of a directory, or lies below a file."""


class ExistsError(StoreError):
    """A file of this name exists already."""


class UnavailableError(StoreError):
    """The store does not answer, or is full: a retry may help."""


class Folder(Protocol):
    """Storage of named bytes. Every method may be called from any thread; raises StoreError on failure,
    UnavailableError if a retry may help."""

    @property
    def url(self) -> str:
        """URL of the folder."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Names below `prefix/`, sorted; empty without any."""
        ...

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises MissingError."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Writes or replaces a file."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Creates a file. Of several concurrent callers one succeeds; the others get ExistsError."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a file. Idempotent."""
        ...

    def sweep(self, prefix: str) -> None:
        """Removes partial files of killed writers below `prefix/`, which `list` does not return."""
        ...


def open_folder(url: str, relay_token: str | None = None, **options: Any) -> Folder:
    """The folder at a path, at `http://` (a relay) or at any URL that fsspec knows. `options`: for fsspec.

    Raises StoreError for a scheme that is unknown or whose package is not installed.
    """
    if url.startswith(("http://", "https://")):
        from etude.weights.client import RelayFolder  # httpx is not a core dependency

        return RelayFolder(url, token=relay_token)
    if "://" not in url or url.startswith("file://"):
        return DirectoryFolder(Path(url.removeprefix("file://")))
    try:
        with _named(url):
            filesystem, path = cast(Callable[..., tuple[Any, str]], url_to_fs)(url, **options)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"this scheme cannot be used: {error}", field="weights.url", received=url, fix=_install(url)
        ) from error
    return FsspecFolder(url, filesystem, path)


class DirectoryFolder:
    """A local directory. Implements Folder; files are fsynced before they are renamed into place."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = f"file://{self._root}"

    def list(self, prefix: str) -> list[str]:
        top = self._root / prefix
        with _named(str(top)):
            found = [path for path in top.rglob("*") if path.is_file() and not path.name.startswith(".")]
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def read(self, name: str) -> bytes:
        with _named(str(self._root / name)):
            return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        self._put(name, lambda path: write_bytes(path, data))

    def create(self, name: str, data: bytes) -> None:
        """See Folder.create. Uses a hard link, which fails if the name exists."""

        def link(path: Path) -> None:
            temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
            try:
                write_bytes(temporary, data)
                os.link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_path(path.parent)

        self._put(name, link)

    def delete(self, name: str) -> None:
        """See Folder.delete. Also removes the directory if it is empty then."""
        path = self._root / name
        with _named(str(path)):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or removed already
                path.parent.rmdir()

    def sweep(self, prefix: str) -> None:
        top = self._root / prefix
        with _named(str(top)):
            for path in [path for path in top.rglob(".*") if path.is_file()]:
                self.delete(path.relative_to(self._root).as_posix())

    def _put(self, name: str, write: Callable[[Path], None]) -> None:
        """Writes a file in its directory; retries if the directory was concurrently removed as empty."""

        def put() -> None:
            path = self._make_parent(name)
            with _named(str(path)):
                write(path)

        retry(put, MissingError, _AT_ONCE)

    def _make_parent(self, name: str) -> Path:
        """The path of a name, whose parent directory is created."""
        path = self._root / name
        with _named(str(path)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise StoreError(
                    "is a file, not a directory",
                    field="weights.url",
                    received=str(path.parent),
                    fix="name a directory",
                ) from error
            except FileNotFoundError as error:  # a file system without mkdir, such as /proc
                raise _denied(str(path.parent)) from error
        return path


class FsspecFolder:
    """An object store through fsspec. Implements Folder; object stores write atomically by themselves."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        self.url = url
        self._files = filesystem
        self._path = path.rstrip("/")

    def list(self, prefix: str) -> list[str]:
        with _named(self.url):
            self._files.invalidate_cache()
            try:
                found: list[str] = self._files.find(self._at(prefix))
            except FileNotFoundError:
                return []
        start = len(self._path) + 1
        return sorted(name[start:] for name in found)

    def read(self, name: str) -> bytes:
        with _named(f"{self.url}/{name}"):
            return self._files.cat_file(self._at(name))

    def write(self, name: str, data: bytes) -> None:
        with _named(f"{self.url}/{name}"):
            self._files.pipe_file(self._at(name), data)

    def create(self, name: str, data: bytes) -> None:
        """See Folder.create. On S3 this is a conditional write (`If-None-Match`)."""
        with _named(f"{self.url}/{name}"):
            self._files.pipe_file(self._at(name), data, mode="create")

    def delete(self, name: str) -> None:
        with _named(f"{self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def sweep(self, prefix: str) -> None:
        """See Folder.sweep. There are no partial files."""

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"


@contextlib.contextmanager
def _named(place: str) -> Generator[None]:
    """Translates a file system's exceptions to StoreErrors."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError("there is no such file", field="weights.url", received=place) from error
    except FileExistsError as error:
        raise ExistsError("the file exists already", field="weights.url", received=place) from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise NotAFileError("the name is not that of a file", field="weights.url", received=place) from error
    except PermissionError as error:
        raise _denied(place) from error
    except OSError as error:
        if error.errno in _DENIED:
            raise _denied(place) from error
        if "PreconditionFailed" in str(error) or "pre-conditions" in str(error):
            raise ExistsError("the file exists already", field="weights.url", received=place) from error
        fix = "free some space, or keep fewer snapshots" if error.errno in FULL else "check that it answers"
        raise UnavailableError(
            f"the weight store failed: {error}", field="weights.url", received=place, fix=fix
        ) from error
    except EtudeError:
        raise
    except Exception as error:  # fsspec does not translate exceptions of a store's client library
        raise UnavailableError(
            f"the weight store failed: {type(error).__name__}: {error}",
            field="weights.url",
            received=place,
            fix="check whether it answers, and its credentials",
        ) from error


def _denied(place: str) -> StoreError:
    return StoreError(
        "permission denied in the weight store",
        field="weights.url",
        received=place,
        fix="grant the permission, or name another store",
    )


def _install(url: str) -> str:
    return install_command("s3fs") if url.startswith("s3") else "see fsspec's list of file systems"
