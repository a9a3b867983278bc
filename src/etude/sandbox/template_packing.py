"""Templates as frames, on the wire and in snapshots."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from etude.sandbox.errors import SnapshotError
from etude.sandbox.inside.frames import FrameError, Unpacker
from etude.sandbox.template import Image, Template


def encode_template(template: Template) -> tuple[dict[str, Any], bytes]:
    """A template whole; `decode_template` gives one of the same digest."""
    contents = template.contents
    image = None if template.image is None else dataclasses.asdict(template.image)
    rows = [[path, len(data)] for path, data in contents.items()]
    return {"name": template.name, "image": image, "files": rows}, b"".join(contents.values())


def decode_template(header: Any, data: bytes) -> Template:
    """What `encode_template` wrote. Raises ValueError, TypeError or KeyError for anything else."""
    files: dict[str, bytes | str] = {}
    start = 0
    for path, size in header["files"]:
        if not isinstance(path, str) or not isinstance(size, int) or size < 0:
            raise ValueError("files are no rows of path and size")
        files[path] = data[start : start + size]
        start += size
    if start != len(data):
        raise ValueError("sizes and contents differ")
    image = header["image"]
    if image is not None:
        image = Image(**{**image, "layers": tuple(image["layers"])})
        texts = (image.name, image.workdir, image.user, *image.layers, *image.env, *image.env.values())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("an image is described in texts")
    if not isinstance(header["name"], str):
        raise TypeError("the name is no text")
    return Template(files, header["name"], image)


def template_key(template: Template) -> str:
    """Names a template on the wire: content, name and image together."""
    image = template.image
    rows = [template.digest, template.name, "" if image is None else image.name]
    return hashlib.blake2b("\0".join(rows).encode(), digest_size=20).hexdigest()


def unpack_templates(data: bytes, origin: str, count: int) -> list[Template]:
    """The templates of `count` frames that lie in a snapshot. Raises SnapshotError."""
    try:
        frames = Unpacker().feed(data)
        if len(frames) != count:
            raise ValueError(f"{len(frames)} frames")
        return [decode_template(header, payload) for header, payload in frames]
    except (FrameError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(
            f"the snapshot has no readable template: {error}",
            field="snapshot",
            received=origin,
            fix="make the snapshot anew",
        ) from error
