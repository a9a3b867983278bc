"""The programs of `inside`: packed for guests, or started here in an interpreter of their own."""

from __future__ import annotations

import io
import sys
import zipfile
from functools import cache
from pathlib import Path

from etude.sandbox.types import Resources

_INSIDE = Path(__file__).parent / "inside"
_MAIN = "import sys\nfrom etude.sandbox.inside.guest import main\nmain(sys.argv[1:])\n"
_DATE = (1980, 1, 1, 0, 0, 0)
_SOURCE = str(Path(__file__).resolve().parents[2])
_LAUNCH = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(sys.argv[2:])"


def python_words(module: str, *words: str, interpreter: str = sys.executable) -> list[str]:
    """The command line that runs `main` of a module of ours in an interpreter that knows nothing else."""
    return [interpreter, "-I", "-S", "-B", "-c", _LAUNCH.format(module), _SOURCE, *words]


def guest_arguments(resources: Resources, **options: object) -> list[str]:
    """Arguments of the program inside: a sandbox's limits, and others by their names."""
    given = {"memory_bytes": resources.memory_bytes, "cpu_s": resources.cpu_s} | options
    given |= {"open_files": resources.open_files}
    return [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@cache
def guest_program() -> bytes:
    """A zip application (`python3 -I -S guest.pyz --line ...`); equal sources give equal bytes."""
    entries = {"__main__.py": _MAIN, "etude/__init__.py": "", "etude/sandbox/__init__.py": ""}
    for path in sorted(_INSIDE.glob("*.py")):
        entries[f"etude/sandbox/inside/{path.name}"] = path.read_text(encoding="utf-8")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, text in entries.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), text)
    return buffer.getvalue()
