"""Builds a source tree of a given size for the code index benchmarks from installed files.

Files come from the installed packages' sources, headers and shared files, each content once. If that is not
enough, modified copies follow, with renamed identifiers and moved lines, so that no file is a duplicate.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SUFFIXES = (
    ".py .pyi .pyx .pxd .c .h .hpp .cpp .cc .hh .cu .cuh .js .ts .mjs .cjs .json .md .rst .txt .toml .yaml"
    " .yml .html .css .pl .pm .sh .cmake .go .rs .java .xml .f90 .inc .m4 .cfg .ini"
)
SUFFIXES = frozenset(_SUFFIXES.split(" "))
LARGEST_BYTES = 2 << 20
RENAMED_SHARE = 0.15
"""Share of identifiers that a copy renames."""

_IDENTIFIER = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{5,}")
_IGNORED = "*.log\nbuild/\n/generated/*\n!/generated/keep.py\n"


def source_roots() -> list[Path]:
    """Directories with much source text that most machines have: Python packages, headers."""
    found = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))]
    pyenv = Path(sys.base_prefix).parent
    if pyenv.name == "versions":
        found += sorted(path / "lib" for path in pyenv.iterdir())
    found += [Path(name) for name in ("/usr/include", "/usr/lib", "/usr/share", "/usr/local/lib")]
    return [path for path in found if path.is_dir()]


def make_tree(into: Path, size_bytes: int, seed: int = 0) -> dict[str, int]:
    """Writes the tree below `into` unless it is there already; returns its numbers of files and bytes."""
    done = into.with_name(into.name + ".done")
    if not done.exists():
        into.mkdir(parents=True, exist_ok=True)
        (into / ".git").mkdir(exist_ok=True)
        (into / ".gitignore").write_text(_IGNORED)
        originals = list(_write_originals(into, size_bytes))
        written = sum(path.stat().st_size for path in originals)
        _write_copies(into, originals, size_bytes - written, random.Random(seed))
        done.write_text("complete\n")
    sizes = [path.stat().st_size for path in into.rglob("*") if path.is_file()]
    return {"num_files": len(sizes), "num_bytes": sum(sizes)}


def edit(content: bytes, rng: random.Random) -> bytes:
    """Renames a share of the identifiers, each everywhere alike, and swaps a few neighbouring lines."""
    names = sorted(set(_IDENTIFIER.findall(content)))
    chosen = {name: _renamed(name, rng) for name in names if rng.random() < RENAMED_SHARE}
    edited = _IDENTIFIER.sub(lambda match: chosen.get(match[0], match[0]), content)
    lines = edited.split(b"\n")
    for _ in range(len(lines) // 20):
        at = rng.randrange(len(lines))
        lines[at - 1], lines[at] = lines[at], lines[at - 1]
    return b"\n".join(lines)


def _renamed(name: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(1, len(name))
    letters = bytes(rng.choice(b"abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(2, 5)))
    return name[:at] + letters + name[at:]


def _write_originals(into: Path, size_bytes: int) -> Iterator[Path]:
    seen: set[bytes] = set()
    written = 0
    for number, root in enumerate(source_roots()):
        for source in _sources(root):
            content = source.read_bytes()
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if digest in seen or written >= size_bytes:
                continue
            seen.add(digest)
            written += len(content)
            target = into / f"part{number:02d}" / source.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            yield target


def _sources(root: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted(files):
            path = Path(directory, name)
            if path.suffix in SUFFIXES and not path.is_symlink() and 0 < path.stat().st_size <= LARGEST_BYTES:
                yield path


def _write_copies(into: Path, originals: list[Path], missing_bytes: int, rng: random.Random) -> None:
    turn = 0
    while missing_bytes > 0:
        for path in originals:
            if missing_bytes <= 0:
                return
            content = edit(path.read_bytes(), rng)
            missing_bytes -= len(content)
            target = into / f"copy{turn}" / path.relative_to(into)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        turn += 1
