"""What an index consists of: one small file, replaced as a whole, that names all others.

    index/
      manifest.json   root, key, directories, segments
      segment-ID/     see segment.py

A segment that the manifest does not name was left by an indexing that did not finish.
"""

from __future__ import annotations

import fcntl
import json
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.agent.index.grep.segment import Segment
from etude.errors import ConfigError, StoreError
from etude.kit.durable import DRAFTS, write_bytes
from etude.kit.leftovers import sweep

__all__ = ["Contents", "IndexBusyError", "Manifest", "new_name", "open_contents", "write_manifest", "writing"]

FORMAT = 4
_NAME = "manifest.json"
_TRIES = 5
_OURS = re.compile(r"segment-[0-9a-f]{16}")
"""Names that may be removed: a directory with other things in it shall not lose them."""


class IndexBusyError(ConfigError):
    """Another process writes the index just now."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The index as a whole."""

    root: str
    key: str
    """The caller's name for the content, such as a commit or a template's digest."""
    directories: list[str]
    """See Listing."""
    segments: list[str]
    """Names of their directories."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Contents:
    """An opened index: immutable, shared by all searches."""

    manifest: Manifest
    segments: tuple[Segment, ...]


def new_name() -> str:
    """A segment's name that no other index has."""
    return f"segment-{secrets.token_hex(8)}"


def write_manifest(into: Path, manifest: Manifest) -> None:
    """Makes `manifest` the index's content, then removes what no longer belongs to it."""
    write_bytes(into / _NAME, json.dumps(asdict(manifest)).encode())
    for path in into.iterdir():
        if path.name not in manifest.segments and _OURS.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _read_manifest(into: Path) -> Manifest:
    """Raises StoreError if there is none, or one that is damaged or of another format."""
    fix = "build the index again"
    try:
        fields = json.loads((into / _NAME).read_bytes())
        if fields["format"] != FORMAT:
            raise StoreError("is of another format", field="index", received=fields["format"], fix=fix)
        return Manifest(**fields)
    except FileNotFoundError as error:
        raise StoreError("there is no index", field="index", received=str(into), fix="build one") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError("is damaged", field="index", received=str(into / _NAME), fix=fix) from error


def open_contents(into: Path) -> Contents:
    """Opens what the manifest names. Raises StoreError for a missing, torn or foreign index."""
    for attempt in range(_TRIES):
        manifest = _read_manifest(into)
        try:
            return Contents(manifest, tuple(Segment(into / name) for name in manifest.segments))
        except StoreError:
            if attempt == _TRIES - 1 or _read_manifest(into) == manifest:  # else it was built again meanwhile
                raise
    raise AssertionError("unreachable")


@contextmanager
def writing(into: Path) -> Iterator[None]:
    """The right to change the index, one process at a time. Raises IndexBusyError if another has it."""
    into.mkdir(parents=True, exist_ok=True)
    with (into / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise IndexBusyError(
                "is being written by another process", field="index", received=str(into), fix="wait for it"
            ) from error
        sweep(into, DRAFTS)
        yield
