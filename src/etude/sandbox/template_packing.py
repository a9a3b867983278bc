"""Templates as bytes, and back: one frame each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from etude.sandbox.errors import SnapshotError
from etude.sandbox.inside.frames import FrameError, Unpacker, pack
from etude.sandbox.template import Image, Template


def pack_template(template: Template) -> bytes:
    """A template as one frame."""
    image = None if template.image is None else dataclasses.asdict(template.image)
    rows = [[path, len(data)] for path, data in template.contents.items()]
    header = {"name": template.name, "image": image, "files": rows}
    return pack(header, b"".join(template.contents.values()))


def unpack_templates(data: bytes, origin: str, count: int) -> list[Template]:
    """The reverse of `count` concatenated `pack_template`s. Raises SnapshotError."""
    try:
        frames = Unpacker().feed(data)
        if len(frames) != count:
            raise ValueError(f"{len(frames)} frames")
        return [_template(header, payload) for header, payload in frames]
    except (FrameError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"the snapshot has no readable template: {error}",
            field="snapshot",
            received=origin,
            fix="make the snapshot anew",
        ) from error


def _template(header: Mapping[str, Any], payload: bytes) -> Template:
    files: dict[str, bytes | str] = {}
    start = 0
    for path, size in header["files"]:
        files[path] = payload[start : start + size]
        start += size
    image = header["image"]
    if image is not None:
        image = Image(**{**image, "layers": tuple(image["layers"])})
    return Template(files, header["name"], image)
