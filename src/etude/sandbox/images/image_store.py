"""Named images: which layers make a root file system, and how programs run in it.

ROOT/images/<quoted name>.json   written atomically, with the image's digest
ROOT/cache/<id>.json             which layers an image of buildah's is, and which one an exported archive
ROOT/buildah/                    see `buildah`
ROOT/layers/, ROOT/tmp/          see `layers`
"""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.kit.durable import read_record, write_json
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.layers import LayerStore
from etude.sandbox.template import Image, decode_image

_VERSION = 1
_MAX_NAME_BYTES = 200
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*)?"
_NAME = re.compile(rf"{_PART}(/{_PART})*(@sha256:[0-9a-f]{{64}})?")
_KEY = re.compile(r"[0-9a-f]{64}\Z")


class ImageStore:
    """Images by name over a store of layers. All methods block; call them in a thread."""

    def __init__(self, root: Path) -> None:
        self.layers = LayerStore(root)
        """The layers of all images."""
        self._images = root / "images"
        self._cache = root / "cache"
        for folder in (self._images, self._cache):
            folder.mkdir(exist_ok=True)

    def save(self, image: Image) -> None:
        """Keeps an image under its name; another image of that name is replaced.

        Raises TemplateError if a layer is missing, or as `check_name`.
        """
        for digest in image.layers:
            self.layers.path(digest)
        record = {"version": _VERSION, **dataclasses.asdict(image), "digest": image.digest}
        write_json(self._file(image.name), record)

    def load(self, name: str) -> Image:
        """The image of that name. Raises TemplateError if it, or a layer of it, is missing or damaged."""
        try:
            data = self._file(name).read_bytes()
        except FileNotFoundError as error:
            raise TemplateError(
                "no such image", field="image", received=name,
                fix=f"build or import it; known: {', '.join(self.list()) or 'none'}",
            ) from error  # fmt: skip
        image = _parse(data, name)
        for digest in image.layers:
            self.layers.path(digest)
        return image

    def has(self, name: str) -> bool:
        """Whether an image of that name was saved; it may be damaged."""
        return self._file(name).exists()

    def list(self) -> list[str]:
        """Names of all images, sorted."""
        return sorted(urllib.parse.unquote(path.stem) for path in self._images.glob("[!.]*.json"))

    def remove(self, name: str) -> None:
        """Forgets a name; the layers stay. Raises TemplateError if there is no such image."""
        try:
            self._file(name).unlink()
        except FileNotFoundError as error:
            raise TemplateError("no such image", field="image", received=name) from error

    def recall(self, key: str) -> dict[str, Any] | None:
        """What `note` kept under `key` (64 hex digits); None if nothing, or if it does not parse."""
        assert _KEY.match(key), key
        return read_record(self._cache / f"{key}.json") or None  # a torn note costs a rebuild, nothing else

    def note(self, key: str, record: Mapping[str, Any]) -> None:
        """Keeps what became of the image that buildah made, or of an exported layer, under its digest."""
        assert _KEY.match(key), key
        write_json(self._cache / f"{key}.json", dict(record))

    def _file(self, name: str) -> Path:
        check_name(name)
        return self._images / f"{urllib.parse.quote(name, safe=':')}.json"


def check_name(name: str) -> None:
    """Raises TemplateError for what FROM and --image could not name: the one rule for names of images."""
    if not _NAME.fullmatch(name) or len(urllib.parse.quote(name, safe=":")) > _MAX_NAME_BYTES:
        raise TemplateError(
            "is no name for an image", field="image", received=name[:100],
            fix="letters, digits and ._- in parts that / separates, each with a :tag if need be, "
            f"{_MAX_NAME_BYTES} bytes at most; for example my-task or python:3.11-slim",
        )  # fmt: skip


def _parse(data: bytes, name: str) -> Image:
    try:
        record = json.loads(data)
        version, digest = record.pop("version"), record.pop("digest")
        image = decode_image(record)
        whole = (version, digest, name) == (_VERSION, image.digest, image.name)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(name) from error
    if not whole:
        raise _damaged(name)
    return image


def _damaged(name: str) -> TemplateError:
    return TemplateError(
        "the image's record is damaged, or of another version", field="image", received=name,
        fix="build or import the image again",
    )  # fmt: skip
