"""Archives, stores and contexts for the tests of images."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etude.sandbox.images.extract import is_whiteout
from etude.sandbox.images.image_store import ImageStore, LayerStore
from etude.sandbox.images.oci import CONFIGS, LAYERS, MANIFESTS, architecture
from etude.sandbox.template import Image

Row = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, link: str = "", mtime: int = 5
) -> tarfile.TarInfo:
    """A tar header by the standard library, owned by somebody else."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.mtime = kind, mode, link, mtime
    info.uid, info.gid, info.uname = 1234, 4321, "stranger"
    return info


def file_member(name: str, data: bytes, mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    """A regular file."""
    info = member(name, mode=mode)
    info.size = len(data)
    return info, data


def tar_bytes(*rows: Row, form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive by the standard library."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for row in rows:
            info, data = row if isinstance(row, tuple) else (row, b"")
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


def add(store: LayerStore, *rows: Row) -> str:
    """A layer of these members."""
    return store.add_tar(io.BytesIO(tar_bytes(*rows)))


def add_files(store: LayerStore, files: Mapping[str, bytes]) -> str:
    """A layer of regular files."""
    return add(store, *(file_member(name, data) for name, data in files.items()))


def tree(root: Path) -> dict[str, str]:
    """Path -> what lies there, for comparisons."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            found[name] = "dir"
        elif path.is_file():
            found[name] = path.read_bytes().decode("latin-1")
        else:
            found[name] = "other"
    return found


def write_tree(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Files below `root`."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def read_image(store: ImageStore, image: Image, path: str) -> bytes | None:
    """A file of an image; None if there is none. Links and opaque directories are not looked through."""
    for layer in [store.layers.path(digest) for digest in reversed(image.layers)]:
        file = layer / path.lstrip("/")
        if file.is_file():
            return file.read_bytes()
        for place in (file, *file.parents):
            if place.is_relative_to(layer) and os.path.lexists(place) and is_whiteout(place.lstat()):
                return None
    return None


def layer_bytes(changes: Mapping[str, bytes | None]) -> bytes:
    """An OCI layer that makes these changes; None: the file is deleted."""
    rows: list[Row] = []
    for name, data in sorted(changes.items()):
        folder, slash, last = name.rpartition("/")
        rows.append(
            file_member(f"{folder}{slash}.wh.{last}", b"") if data is None else file_member(name, data)
        )
    return tar_bytes(*rows)


def layers_of(store: LayerStore) -> list[str]:
    """Digests of the layers in a store, sorted; damaged ones are left out."""
    digests = (f"sha256:{folder.name}" for folder in (store.root / "layers").iterdir())
    return sorted(digest for digest in digests if store.has(digest))


def leftovers(store: LayerStore) -> list[str]:
    """What lies in the store's folder for temporary files."""
    return [path.name for path in (store.root / "tmp").iterdir()]


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Layout:
    """An OCI layout in the making; `files` is what it will hold."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = digest_of(data)
        self.files[f"blobs/sha256/{digest[7:]}"] = data
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def document(self, value: object, media_type: str) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), media_type)

    def image(
        self, *layers: bytes, compress: Callable[[bytes], bytes] = bytes, kind: str = LAYERS[0], **config: Any
    ) -> dict[str, Any]:
        whole = {
            "architecture": architecture(),
            "os": "linux",
            "config": {"Env": ["A=b=c"], "WorkingDir": "/app", "User": "me"},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
            "history": [{"created": "2020-02-02T02:02:02Z", "created_by": "a test"} for _ in layers],
            **config,
        }
        rows = [self.blob(compress(layer), kind) for layer in layers]
        manifest = {"schemaVersion": 2, "config": self.document(whole, CONFIGS[0]), "layers": rows}
        return self.document(manifest, MANIFESTS[0])

    def index(self, *manifests: dict[str, Any]) -> Layout:
        self.files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()
        return self

    def write(self, folder: Path) -> Path:
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    def pack(self, path: Path, compress: Callable[[bytes], bytes] = bytes) -> Path:
        path.write_bytes(
            compress(tar_bytes(*(file_member(f"./{name}", data) for name, data in self.files.items())))
        )
        return path


def is_running(*argv: str) -> bool:
    """Whether any process of this machine has this command line."""
    wanted = "\0".join([*argv, ""]).encode()
    found = False
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found = found or path.read_bytes() == wanted
    return found
