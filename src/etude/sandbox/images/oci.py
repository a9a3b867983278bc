"""Imports images from an OCI layout (directory or archive) or a `docker save` archive, and exports them.

Nothing is fetched. Every digest is checked: index → manifest → configuration and layers, and the layers' own
digests (`diff_ids`). A name in the archive is never used as a path on this machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import posixpath
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from etude.kit.durable import whole_file
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.archives import Blobs, DigestReader, blob_name, open_blobs, read_document
from etude.sandbox.images.extract import storage_error
from etude.sandbox.images.image_store import MAX_LAYER_BYTES, ImageStore, check_name
from etude.sandbox.paths import WORKSPACE
from etude.sandbox.template import Image

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
INDEXES = (f"{OCI}.index.v1+json", f"{DOCKER}.distribution.manifest.list.v2+json")
MANIFESTS = (f"{OCI}.manifest.v1+json", f"{DOCKER}.distribution.manifest.v2+json")
CONFIGS = (f"{OCI}.config.v1+json", f"{DOCKER}.container.image.v1+json")
LAYERS = (
    f"{OCI}.layer.v1.tar", f"{OCI}.layer.v1.tar+gzip", f"{OCI}.layer.v1.tar+zstd",
    f"{DOCKER}.image.rootfs.diff.tar", f"{DOCKER}.image.rootfs.diff.tar.gzip",
)  # fmt: skip
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_MAX_INDEX_DEPTH = 4
_MAX_MANIFESTS = 1000
_MAX_LAYERS = 512

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

Document = Mapping[str, Any]
Data = io.BufferedRandom | io.BytesIO


Candidate = tuple[Document, tuple[str, ...]]
"""A manifest that an index lists: its descriptor, and its names."""
Layer = tuple[str, str | None]
"""A layer's part of the archive, and the stored digest of that (compressed) part; None if there is none."""


def architecture() -> str:
    """OCI's name of this machine's architecture."""
    return _MACHINES.get(platform.machine(), platform.machine())


def import_image(source: Path, store: ImageStore, name: str, reference: str | None = None) -> Image:
    """Imports the image for this machine and saves it under `name`. Blocks.

    `reference` selects one of several images in the archive by its name there. Raises TemplateError for
    missing, damaged, unknown or ambiguous parts; layers imported by then stay in the store.
    """
    check_name(name)
    with store.layers.scratch() as scratch, open_blobs(source, scratch) as blobs:
        if blobs.has("index.json"):
            config, layers = _read_oci(blobs, reference)
        elif blobs.has("manifest.json"):
            config, layers = _read_docker(blobs, reference)
        else:
            raise TemplateError(
                "is neither an OCI layout nor an archive of `docker save`",
                field="image",
                received=str(source),
                fix="name one that contains index.json or manifest.json",
            )
        diff_ids = _diff_ids(config, len(layers))
        found = [
            _import_layer(blobs, store, part, digest, diff_id)
            for (part, digest), diff_id in zip(layers, diff_ids, strict=True)
        ]
    image = _image(config, found, name)
    store.save(image)
    return image


def _read_oci(blobs: Blobs, reference: str | None) -> tuple[Document, list[Layer]]:
    index = _object(read_document(blobs, "index.json"), "index.json")
    every = _candidates(blobs, index, (), 0)
    found = [descriptor for descriptor, names in every if reference is None or reference in names]
    if len({descriptor["digest"] for descriptor in found}) != 1:
        raise _not_one(len(found), reference or architecture(), {n for _, names in every for n in names})
    descriptor = found[0]
    manifest = _linked(blobs, descriptor, MANIFESTS)
    config = _linked(blobs, _field(manifest, "config", dict, "manifest"), CONFIGS)
    rows = _field(manifest, "layers", list, "manifest")
    layers: list[Layer] = []
    for row in rows:
        if not isinstance(row, dict) or row.get("mediaType") not in LAYERS:
            raise _unknown("layer", row.get("mediaType") if isinstance(row, dict) else row)
        layers.append((blob_name(row.get("digest")), row["digest"]))
    return config, layers


def _not_one(num_images: int, received: str | None, names: set[str]) -> TemplateError:
    return TemplateError(
        f"holds {num_images} matching images, not one", field="image", received=received,
        fix=f"choose one by its name in it (`--tag`): {', '.join(sorted(names)) or 'all are unnamed'}",
    )  # fmt: skip


def _candidates(blobs: Blobs, index: Document, names: tuple[str, ...], depth: int) -> list[Candidate]:
    """Manifests of this platform below an index."""
    rows = _field(index, "manifests", list, "index")
    if depth > _MAX_INDEX_DEPTH or len(rows) > _MAX_MANIFESTS:
        raise TemplateError("has too many indexes", field="image")
    found: list[Candidate] = []
    for row in rows:
        if not isinstance(row, dict):
            raise _broken("index", "manifests")
        annotations = row.get("annotations") or {}
        own = tuple(
            str(annotations[key]) for key in _NAMES if isinstance(annotations, dict) and key in annotations
        )
        if row.get("mediaType") in INDEXES:
            below = _linked(blobs, row, INDEXES)
            found += _candidates(blobs, below, (*names, *own), depth + 1)
        elif row.get("mediaType") not in MANIFESTS:
            raise _unknown("manifest", row.get("mediaType"))
        elif _fits(row.get("platform")):
            blob_name(row.get("digest"))
            found.append((row, (*names, *own)))
    return found


def _fits(platform: object) -> bool:
    """Whether a descriptor is for this platform; without a platform its configuration is checked later."""
    if not isinstance(platform, dict):
        return True
    return platform.get("os") == "linux" and platform.get("architecture") == architecture()


def _read_docker(blobs: Blobs, reference: str | None) -> tuple[Document, list[Layer]]:
    rows = _parse(read_document(blobs, "manifest.json"), "manifest.json")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _broken("manifest.json", "list of images")
    names = {str(tag) for row in rows for tag in row.get("RepoTags") or ()}
    if reference is not None:
        rows = [row for row in rows if reference in (row.get("RepoTags") or ())]
    if len(rows) != 1:
        raise _not_one(len(rows), reference, names)
    name = _field(rows[0], "Config", str, "manifest.json")
    # Its file is named after its digest; newer archives keep it among the blobs.
    stem = name.rpartition("/")[2].removesuffix(".json")
    data = read_document(blobs, name, f"sha256:{stem}" if len(stem) == 64 else None)
    parts = _field(rows[0], "Layers", list, "manifest.json")
    if not all(isinstance(part, str) for part in parts):
        raise _broken("manifest.json", "Layers")
    return _object(data, name), [(part, None) for part in parts]


def _import_layer(blobs: Blobs, store: ImageStore, part: str, digest: str | None, diff_id: str) -> str:
    """Imports a layer, unless the store has it or has exported it; its digest in the store."""
    exported = store.read_cache(diff_id.removeprefix("sha256:")) or {}
    for known in (diff_id, str(exported.get("layer"))):
        if store.layers.has(known):
            return known
    with blobs.open(part) as stream:
        packed = DigestReader(stream, part, MAX_LAYER_BYTES)
        store.layers.add_tar(packed, diff_id, name=part)
        packed.drain()
    packed.check(digest)
    return diff_id


def _diff_ids(config: Document, num_layers: int) -> list[str]:
    machine = architecture()
    if config.get("os", "linux") != "linux" or config.get("architecture") != machine:
        raise TemplateError(
            "is an image for another platform", field="image",
            received=f"{config.get('os')}/{config.get('architecture')}", fix=f"use one for linux/{machine}",
        )  # fmt: skip
    diff_ids = _field(_field(config, "rootfs", dict, "configuration"), "diff_ids", list, "configuration")
    if len(diff_ids) != num_layers or num_layers > _MAX_LAYERS:
        raise TemplateError(
            "manifest and configuration disagree about the layers", field="image",
            received=f"{num_layers} layers, {len(diff_ids)} diff_ids",
        )  # fmt: skip
    for diff_id in diff_ids:
        blob_name(diff_id)
    return diff_ids


def _image(config: Document, layers: list[str], name: str) -> Image:
    settings = config.get("config") or {}
    if not isinstance(settings, dict):
        raise _broken("configuration", "config")
    env: dict[str, str] = {}
    for row in settings.get("Env") or []:
        key, equals, value = row.partition("=") if isinstance(row, str) else ("", "", "")
        if not key or not equals or "\0" in row:
            raise _broken("configuration", "Env")
        env[key] = value
    workdir, user = settings.get("WorkingDir") or "/", settings.get("User") or "root"
    if not isinstance(workdir, str) or not isinstance(user, str) or not workdir.startswith("/"):
        raise _broken("configuration", "WorkingDir or User")
    try:
        "".join([*env, *env.values(), workdir, user]).encode()
    except UnicodeEncodeError as error:
        raise _broken("configuration", "text") from error
    if "\0" in workdir + user:
        raise _broken("configuration", "WorkingDir or User")
    # As with built images, the root directory is never the workspace.
    workdir = posixpath.normpath(workdir).replace("//", "/")
    return Image(name, tuple(layers), env, WORKSPACE if workdir == "/" else workdir, user)


def _linked(blobs: Blobs, descriptor: Document, kinds: tuple[str, ...]) -> Document:
    """Reads the JSON object that a descriptor refers to, and checks its size and digest."""
    if descriptor.get("mediaType") not in kinds:
        raise _unknown("document", descriptor.get("mediaType"))
    name = blob_name(descriptor.get("digest"))
    data = read_document(blobs, name, descriptor["digest"])
    if descriptor.get("size") != len(data):
        raise TemplateError("does not have the stated size", field=name, received=descriptor.get("size"))
    return _object(data, name)


def _parse(data: bytes, name: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"is not JSON: {error}", field=name) from error


def _object(data: bytes, name: str) -> Document:
    value = _parse(data, name)
    if not isinstance(value, dict):
        raise _broken(name, "object")
    return value


def _field(table: Document, key: str, kind: type[Any], where: str) -> Any:
    value = table.get(key)
    if not isinstance(value, kind):
        raise _broken(where, key)
    return value


def _broken(where: str, what: str) -> TemplateError:
    return TemplateError(
        f"{where} has no valid {what}", field="image", fix="make or download the image again"
    )


def _unknown(what: str, media_type: object) -> TemplateError:
    return TemplateError(
        f"a {what} of an unknown type", field="image", received=media_type,
        fix="convert the image to plain OCI; encrypted and foreign layers are not supported",
    )  # fmt: skip


_CREATED = "2000-01-01T00:00:00Z"
"""Creation time of all exported images, so that equal ones are equal bytes."""


def export_image(image: Image, store: ImageStore, target: Path) -> str:
    """Writes an uncompressed archive atomically, and returns the manifest's digest. Blocks.

    The layers' digests are those of the sorted archives that the store writes, so they may differ from the
    image's own. Raises TemplateError for missing or damaged layers, and for a target without a directory.
    """
    if not target.parent.is_dir():
        raise TemplateError(
            "the directory to write to does not exist",
            field="target",
            received=str(target.parent),
            fix=f"create it (mkdir -p {target.parent}), or name another",
        )
    with store.layers.scratch() as scratch:
        try:
            with whole_file(target, sync=False) as file:
                return _write(image, store, scratch, file)
        except OSError as error:
            raise storage_error(error, "image archive", str(target)) from error


def _write(image: Image, store: ImageStore, scratch: Path, file: BinaryIO) -> str:
    rows: list[dict[str, Any]] = []
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for digest in image.layers:
            with (scratch / "layer.tar").open("w+b") as layer:
                store.layers.export_tar(digest, layer)
                row = _add_blob(archive, LAYERS[0], layer)
            store.write_cache(row["digest"].removeprefix("sha256:"), {"layer": digest})
            rows.append(row)
        config = _add_json(archive, CONFIGS[0], _config(image, [row["digest"] for row in rows]))
        manifest = {"schemaVersion": 2, "mediaType": MANIFESTS[0], "config": config, "layers": rows}
        descriptor = _add_json(archive, MANIFESTS[0], manifest)
        named = {**descriptor, "annotations": {"org.opencontainers.image.ref.name": image.name}}
        index = {"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": [named]}
        for name, value in (("index.json", index), ("oci-layout", {"imageLayoutVersion": "1.0.0"})):
            _add(archive, name, io.BytesIO(_encoded(value)))
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
    # buildah rejects base images whose history has fewer entries than layers. Its cache compares history and
    # layers only, whatever else has changed, and ignores entries without times.
    step = {"created": _CREATED, "created_by": f"etude {hashlib.sha256(_encoded(config)).hexdigest()}"}
    return config | {"history": [step] * len(diff_ids)}


def _add_json(archive: tarfile.TarFile, media_type: str, value: Mapping[str, Any]) -> dict[str, Any]:
    return _add_blob(archive, media_type, io.BytesIO(_encoded(value)))


def _add_blob(archive: tarfile.TarFile, media_type: str, data: Data) -> dict[str, Any]:
    """Adds a blob; its descriptor."""
    data.seek(0)
    digest = f"sha256:{hashlib.file_digest(data, 'sha256').hexdigest()}"
    size = _add(archive, blob_name(digest), data)
    return {"mediaType": media_type, "digest": digest, "size": size}


def _add(archive: tarfile.TarFile, name: str, data: Data) -> int:
    row = tarfile.TarInfo(name)
    row.size = data.seek(0, io.SEEK_END)
    data.seek(0)
    archive.addfile(row, data)
    return row.size


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
