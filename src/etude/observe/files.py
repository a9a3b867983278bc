"""Atomic files: a reader sees the old content or the new, never a part, whatever is killed when."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replaces `path` with `data`: a temporary file beside it, fsync, rename, fsync of the folder.

    `mode`: its permissions from the beginning; those of any new file unless they are given. Several threads
    and processes may write one path; the last one counts.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` with `text` in UTF-8, atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` with `value` as indented JSON, atomically.

    Raises ValueError for NaN and infinities, which JSON has no words for; the file then stays as it was.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def make_directory(path: Path) -> None:
    """Makes a folder, and those above it that are missing, durably: what is written into it later is not lost
    with its name."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)


def sync_directory(path: Path) -> None:
    """Makes creations and renames inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
