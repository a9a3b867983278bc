"""Archives, stores and contexts for the tests of images."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.layers import LayerStore
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
    """A file of an image; None if there is none."""
    found = store.view(image).find(path)
    return None if found is None else Path(found.path.decode()).read_bytes()


def leftovers(store: LayerStore) -> list[str]:
    """What lies in the store's folder for temporary files."""
    return [path.name for path in (store.root / "tmp").iterdir()]
