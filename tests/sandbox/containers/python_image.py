"""An image for tests that run podman: Debian with its Python, made once on a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

IMAGE = "localhost/etude-tests:python"
SETTINGS = '[engine]\nruntime = "runc"\n'
"""What podman needs where control groups are of both versions; crun refuses those."""


def podman(*words: str) -> str:
    """What podman writes. Raises CalledProcessError."""
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True, timeout=300).stdout


def ensure_image(directory: Path) -> str:
    """Its name, once podman has it; skips where it cannot be made. `directory`: for files on the way."""
    missing = [program for program in ("podman", "runc", "mmdebstrap") if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and lacks {', '.join(missing) or 'nothing else'}")
    (directory / "containers.conf").write_text(SETTINGS)
    os.environ["CONTAINERS_CONF"] = str(directory / "containers.conf")
    if subprocess.run(["podman", "image", "exists", IMAGE], check=False, timeout=60).returncode:
        archive = directory / "root.tar"
        words = ["--quiet", "--variant=minbase", "--include=python3", "bookworm", str(archive)]
        subprocess.run(["mmdebstrap", *words], check=True, timeout=900)
        podman("import", "--quiet", str(archive), IMAGE)
        archive.unlink()
    return IMAGE
