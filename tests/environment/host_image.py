"""A small image for tests of tasks that have one: the host's shell, tar and coreutils, in the layer store."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.template import Image
from tests.sandbox.images.image_builders import Row, add, file_member, member

PROGRAMS = (
    "sh", "base64", "cat", "chmod", "cp", "cut", "find", "grep", "head", "id", "ln", "ls", "mkdir", "mv",
    "readlink", "rm", "rmdir", "sleep", "sort", "stat", "tail", "tar", "touch", "true", "wc",
)  # fmt: skip


@cache
def _programs() -> tuple[Row, ...]:
    """The programs with the libraries that they load."""
    paths = {path for name in PROGRAMS if (path := shutil.which(name)) is not None}
    shown = subprocess.run(["ldd", *sorted(paths)], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"(/\S+) \(0x", shown))
    rows: list[Row] = [member("tmp", b"5", 0o1777)]
    for path in sorted(paths):
        rows.append(file_member(f"bin/{Path(path).name}", Path(path).read_bytes(), 0o755))
    for path in sorted(libraries):
        rows.append(file_member(path.lstrip("/"), Path(path).read_bytes(), 0o755))
    return tuple(rows)


def save_image(name: str, *rows: Row, workdir: str = "/work", env: dict[str, str] | None = None) -> Image:
    """An image of this name in the store of this process's state directory, with `rows` in a layer above."""
    store = ImageStore(default_state_directory() / "images")
    found = [add(store.layers, *_programs()), *([add(store.layers, *rows)] if rows else [])]
    image = Image(name, tuple(found), env or {"PATH": "/bin"}, workdir, "root")
    store.save(image)
    return image
