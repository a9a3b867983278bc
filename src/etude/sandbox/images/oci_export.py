"""An image of ours as an OCI layout archive, which other tools load. Equal images give equal bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from etude.kit.durable import whole_file
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.blobs import blob_name
from etude.sandbox.images.extract import storage_error
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import CONFIGS, INDEXES, LAYERS, MANIFESTS, architecture
from etude.sandbox.images.tar import Entry, TarWriter
from etude.sandbox.template import Image

_CREATED = "2000-01-01T00:00:00Z"
"""Of all images: equal ones are equal bytes."""


def export_image(image: Image, store: ImageStore, target: Path) -> str:
    """Writes an uncompressed archive, whole or not at all, and returns the manifest's digest. Blocks.

    The layers' digests are those of the sorted archives that the store makes, so they need not be the
    image's own. Raises TemplateError for missing or damaged layers, and for a target in no directory.
    """
    if not target.parent.is_dir():
        raise TemplateError(
            "there is no such directory to write to",
            field="target",
            received=str(target.parent),
            fix=f"make it (mkdir -p {target.parent}), or name a file in another",
        )
    with store.layers.scratch() as scratch:
        try:
            with whole_file(target, sync=False) as file:
                return _write(image, store, scratch, file)
        except OSError as error:
            raise storage_error(error, "image archive", str(target)) from error


def _write(image: Image, store: ImageStore, scratch: Path, file: BinaryIO) -> str:
    writer = TarWriter(file)
    written: set[str] = set()
    rows: list[dict[str, Any]] = []
    for digest in image.layers:
        info = store.layers.info(digest)
        packed = scratch / "layer.tar"
        with packed.open("wb") as layer:
            exported = store.layers.export_tar(digest, layer)
        rows.append(_descriptor(LAYERS[0], exported, packed.stat().st_size))
        if exported not in written:
            written.add(exported)
            with packed.open("rb") as layer:
                writer.add(Entry(blob_name(exported).encode(), "file", size_bytes=info.packed_bytes), layer)
    config = _add_json(writer, CONFIGS[0], _config(image, [row["digest"] for row in rows]))
    manifest = {"schemaVersion": 2, "mediaType": MANIFESTS[0], "config": config, "layers": rows}
    descriptor = _add_json(writer, MANIFESTS[0], manifest)
    named = {**descriptor, "annotations": {"org.opencontainers.image.ref.name": image.name}}
    index = {"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": [named]}
    writer.add_bytes("index.json", _encoded(index))
    writer.add_bytes("oci-layout", _encoded({"imageLayoutVersion": "1.0.0"}))
    writer.close()
    return descriptor["digest"]


def _config(image: Image, diff_ids: list[str]) -> dict[str, Any]:
    config = {
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "Env": [f"{key}={value}" for key, value in sorted(image.env.items())],
            "WorkingDir": image.workdir,
            "User": image.user,
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    # buildah builds on no image whose history names fewer layers than it has. It reuses what was built on one
    # of equal history and layers, whatever else has changed, and nothing where there are no times.
    step = {"created": _CREATED, "created_by": f"etude {hashlib.sha256(_encoded(config)).hexdigest()}"}
    return config | {"history": [step] * len(diff_ids)}


def _add_json(writer: TarWriter, media_type: str, value: Mapping[str, Any]) -> dict[str, Any]:
    data = _encoded(value)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    writer.add_bytes(blob_name(digest), data)
    return _descriptor(media_type, digest, len(data))


def _descriptor(media_type: str, digest: str, size_bytes: int) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest, "size": size_bytes}


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
