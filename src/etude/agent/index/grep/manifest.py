"""Layout of an index on disk: one directory, replaced as a whole.

index/
  manifest.json   root, key, directories, segments
  segment-ID/     see segment.py
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.agent.index.grep.segment import Segment
from etude.errors import ConfigError, StoreError
from etude.kit.durable import DRAFTS

FORMAT = 4
_NAME = "manifest.json"
_OURS = re.compile(
    rf"manifest\.json|segment-[0-9a-f]{{16}}|lock|\.manifest\.json\.\w+\.tmp|{re.escape(DRAFTS)}.*", re.DOTALL
)
"""File names of an index, including those of earlier versions and of their killed builds."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `manifest.json`."""

    root: str
    key: str
    """The caller's name for the content, such as a commit or a template's digest."""
    directories: list[str]
    """See Listing."""
    segments: list[str]
    """Names of the segments' directories, unique to this index."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Contents:
    """An opened index: immutable, shared by all searches."""

    manifest: Manifest
    segments: tuple[Segment, ...]


def check_replaceable(into: Path) -> None:
    """Raises ConfigError for a directory with other files, which would be lost."""
    others = [path.name for path in into.iterdir() if not _OURS.fullmatch(path.name)] if into.exists() else []
    if others:
        raise ConfigError(
            f"contains files that are not of an index: {others[0]}",
            field="index",
            received=str(into),
            fix="name a new directory",
        )


def write_manifest(into: Path, manifest: Manifest) -> None:
    """Writes the manifest into the draft of an index, as its last file."""
    (into / _NAME).write_text(json.dumps(asdict(manifest)))


def open_contents(into: Path) -> Contents:
    """Opens the segments that the manifest names. Raises StoreError for a missing, torn or foreign index."""
    fix = "build the index again"
    try:
        fields = json.loads((into / _NAME).read_bytes())
        if fields["format"] != FORMAT:
            raise StoreError("is of another format", field="index", received=fields["format"], fix=fix)
        manifest = Manifest(**fields)
    except FileNotFoundError as error:
        raise StoreError("there is no index", field="index", received=str(into), fix="build one") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError("is damaged", field="index", received=str(into / _NAME), fix=fix) from error
    return Contents(manifest, tuple(Segment(into / name) for name in manifest.segments))
