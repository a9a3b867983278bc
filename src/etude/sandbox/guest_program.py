"""Packs the programs of `inside` for guests, or starts them on the host in a separate interpreter; and sends
a template's files into a booted guest."""

from __future__ import annotations

import io
import sys
import zipfile
from functools import cache
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox.channel import Channel
from etude.sandbox.files import batches
from etude.sandbox.template import Template
from etude.sandbox.types import Resources

_INSIDE = Path(__file__).parent / "inside"
_MAIN = "import sys\nfrom etude.sandbox.inside.guest import main\nmain(sys.argv[1:])\n"
_DATE = (1980, 1, 1, 0, 0, 0)
_SOURCE = str(Path(__file__).resolve().parents[2])
_LAUNCH = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(sys.argv[2:])"


def python_words(module: str, *words: str, interpreter: str = sys.executable) -> list[str]:
    """The command line that runs `main` of one of our modules in an isolated interpreter."""
    return [interpreter, "-I", "-S", "-B", "-c", _LAUNCH.format(module), _SOURCE, *words]


def guest_arguments(resources: Resources, **options: object) -> list[str]:
    """Command-line arguments of the program inside: the resource limits, and other options by name."""
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


_BATCH_BYTES, _FILE_BYTES = 8 << 20, 8 << 10
"""Most bytes of one batch, and the bytes that each file counts for in addition to its contents."""


async def install_template(
    channel: Channel, template: Template, deadline_s: float, keep: bool = False
) -> None:
    """Writes the template's files into the workspace. `deadline_s` is for each batch; `keep`: files that the
    image has there stay. Raises SandboxError."""
    files = list(template.contents.items())
    more = False
    # At least one batch, so that an empty workspace is marked complete as well.
    for part in list(batches([len(data) + _FILE_BYTES for _, data in files], _BATCH_BYTES)) or [slice(0)]:
        rows = [[path, len(data)] for path, data in files[part]]
        header: dict[str, object] = {"op": "install", "files": rows, "more": more, "keep": keep and not more}
        answer, _ = await channel.request(header, b"".join(data for _, data in files[part]), deadline_s)
        if "fault" in answer:
            raise SandboxError(
                f"the template cannot be installed: {answer['fault'][1]}", field="template", received=rows[:3]
            )
        more = True
