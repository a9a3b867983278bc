"""Packs the program that runs inside guests: one zip file, standard library only."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

_INSIDE = Path(__file__).parent / "inside"
_MAIN = "import sys\nfrom etude.sandbox.inside.guest import main\nmain(sys.argv[1:])\n"
_DATE = (1980, 1, 1, 0, 0, 0)


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
