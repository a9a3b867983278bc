"""The templates that a fork server stores, and the requests that send them."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, OrderedDict
from collections.abc import Sequence

from etude.sandbox.errors import TemplateError
from etude.sandbox.inside.frames import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameError, pack
from etude.sandbox.inside.namespaces import ROOT_ENVIRONMENT
from etude.sandbox.snapshots import Spec
from etude.sandbox.template import Template

MAX_IDLE_TEMPLATES = 256
MAX_IDLE_TEMPLATE_BYTES = 256 << 20
"""Most templates without a sandbox that a fork server keeps, in number and bytes."""


class TemplateUses:
    """Reference counts of the templates that a fork server stores, and eviction of idle ones."""

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()
        self._stored: set[str] = set()
        """Digests of the templates that the fork server stores."""
        self._idle: OrderedDict[str, int] = OrderedDict()
        """Digest -> bytes of the templates without a sandbox, least recently used first."""

    def acquire(self, template: Template) -> bool:
        """Adds a use; returns whether the template must be sent to the fork server."""
        digest = template.digest
        new = digest not in self._stored
        self._stored.add(digest)
        self._uses[digest] += 1
        self._idle.pop(digest, None)
        return new

    def mark_missing(self, template: Template) -> None:
        """Marks a template whose transfer may have failed: the next sandbox sends it again."""
        self._stored.discard(template.digest)

    def release(self, template: Template) -> list[str]:
        """Removes a use; returns the digests of the templates that are to be evicted."""
        digest = template.digest
        self._uses[digest] -= 1
        if self._uses[digest] > 0:
            return []
        self._idle[digest] = sum(map(len, template.contents.values()))
        forgotten: list[str] = []
        while len(self._idle) > MAX_IDLE_TEMPLATES or sum(self._idle.values()) > MAX_IDLE_TEMPLATE_BYTES:
            oldest, _ = self._idle.popitem(last=False)
            del self._uses[oldest]
            self._stored.discard(oldest)
            forgotten.append(oldest)
        return forgotten

    def clear(self) -> None:
        """Resets the counts after the fork server has ended."""
        for known in (self._uses, self._stored, self._idle):
            known.clear()


def pack_files(template: Template) -> int:
    """Packs the template's files as one frame in a memfd; with an image, below its workspace.

    Raises TemplateError for more than a frame can hold.
    """
    prefix = "" if template.image is None else template.workspace.strip("/") + "/"
    rows = [[prefix + path, len(data)] for path, data in template.contents.items()]
    try:
        frame = pack({"files": rows}, b"".join(template.contents.values()))
    except FrameError as error:
        raise TemplateError(
            "the files are too large together",
            field="template.files",
            received=str(error),
            fix=f"send at most {MAX_PAYLOAD_BYTES} bytes, and {MAX_HEADER_BYTES} of names; upload the rest",
        ) from error
    packed = os.memfd_create("template")
    with os.fdopen(os.dup(packed), "wb") as file:
        file.write(frame)
    os.lseek(packed, 0, os.SEEK_SET)
    return packed


def layer_folder(digest: str) -> str:
    """Path of a layer's files in the layer store, below its directory of layers."""
    return f"{digest.removeprefix('sha256:')}/root"


def plan_request(
    number: int, spec: Spec, layers: Sequence[str], has_groups: bool, new_template: bool, home: str
) -> dict[str, object]:
    """The request `begin` for the first process `number`; see `inside.zygote`.

    `layers`: saved layers, uppermost first; `home`: HOME of commands that run in a directory of the host.
    """
    template, resources = spec.template, spec.resources
    image = template.image
    is_root = image is not None and image.user in ("", "root", "0")
    image_env = {} if image is None else dict(image.env)
    if template.directory:
        image_env["HOME"] = home
    return {
        "op": "begin",
        "id": number,
        "plan": {
            "digest": template.digest,
            "disk_bytes": resources.disk_bytes,
            "layers": layers,
            "has_image": image is not None,
            "images": () if image is None else [layer_folder(layer) for layer in image.layers[::-1]],
            "workspace": template.workspace,
            "user": "agent" if image is None else image.user,
            "in_place": bool(template.directory),
            "passed_over": sorted(template.passed_over),
        },
        "limits": dataclasses.asdict(resources),
        "env": {**ROOT_ENVIRONMENT, **image_env} if is_root else image_env,
        "emulate_root": is_root,
        "has_groups": has_groups,
        "new_template": new_template,
    }
