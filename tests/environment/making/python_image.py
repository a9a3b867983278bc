"""An image with this machine's Python and pytest, for tests of what runs a project's tests."""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import py
import pytest

from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image
from tests.sandbox.images.image_builders import Row, file_member, tar_bytes

NAME = "tests/python"
_PROGRAMS = ("sh", "dirname", "tar", "mkdir", "rm", "cp", "cat", "readlink", "chmod", "head", "tail")
_LEFT_OUT = (
    "site-packages",
    "test",
    "idlelib",
    "ensurepip",
    "lib2to3",
    "tkinter",
    "__pycache__",
    "pydoc_data",
)
_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


def save_python_image(store: ImageStore, more: Mapping[str, str] | None = None) -> str:
    """Its name. `more`: files of a second layer. Skips where this machine's Python cannot be taken along."""
    if shutil.which("ldd") is None:
        pytest.skip("needs ldd")
    python, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    programs = [Path(path) for name in _PROGRAMS if (path := shutil.which(name))]
    extensions = sorted((library / "lib-dynload").glob("*.so"))
    listed = subprocess.run(
        ["ldd", *map(str, [python, *programs, *extensions])], capture_output=True, text=True, check=False
    ).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    rows: list[Row] = [
        file_member(f"bin/{path.name}", path.resolve().read_bytes(), 0o755) for path in programs
    ]
    rows += [file_member(name.lstrip("/"), Path(name).read_bytes(), 0o755) for name in sorted(libraries)]
    rows.append(file_member("bin/python3", python.read_bytes(), 0o755))
    rows += _below(library, "lib/" + library.name)
    for name in _PACKAGES:
        [folder] = {Path(path, name) for path in sys.path if Path(path, name, "__init__.py").is_file()}
        rows += _below(folder, f"lib/{library.name}/{name}")
    rows.append(file_member(f"lib/{library.name}/py.py", Path(str(py.__file__)).read_bytes()))
    rows.append(file_member("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"))
    layer = store.layers.add_tar(io.BytesIO(tar_bytes(*rows)))
    layers = [layer]
    if more:
        others = [file_member(path, text.encode()) for path, text in more.items()]
        layers.append(store.layers.add_tar(io.BytesIO(tar_bytes(*others))))
    store.save(Image(NAME, tuple(layers), {"PATH": "/bin", "PYTHONHOME": "/"}, "/"))
    return NAME


def _below(top: Path, target: str) -> list[Row]:
    files = [
        path
        for path in sorted(top.rglob("*"))
        if path.suffix in (".py", ".so") and not set(path.relative_to(top).parts) & set(_LEFT_OUT)
    ]
    contents = {path: path.read_bytes() for path in files if path.is_file()}
    for path in files:
        compiled = Path(importlib.util.cache_from_source(str(path)))
        if path.suffix == ".py" and compiled.is_file():
            contents[compiled] = _unchecked(compiled.read_bytes())
    return [
        file_member(f"{target}/{path.relative_to(top).as_posix()}", data, 0o755)
        for path, data in contents.items()
    ]


def _unchecked(bytecode: bytes) -> bytes:
    """Bytecode that counts whatever the time of its source is: else each run would compile all of pytest."""
    return bytecode[:4] + (1).to_bytes(4, "little") + bytes(8) + bytecode[16:]
