"""The programs of `inside`: packed for guests, or started here in an interpreter of their own; and how
guests get the files of a template that they were booted without."""

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


_BATCH_BYTES, _FILE_BYTES = 8 << 20, 8 << 10
"""Of one batch, and what each file counts for beside its contents."""


async def install_template(
    channel: Channel, template: Template, deadline_s: float, keep: bool = False
) -> None:
    """Fills the workspace. `deadline_s` is for each batch; `keep`: what an image has there stays.

    Raises SandboxError if that cannot be done.
    """
    files = list(template.contents.items())
    more = False
    # One at least, so that a workspace without files is marked complete as well.
    for part in list(batches([len(data) + _FILE_BYTES for _, data in files], _BATCH_BYTES)) or [slice(0)]:
        rows = [[path, len(data)] for path, data in files[part]]
        header: dict[str, object] = {"op": "install", "files": rows, "more": more, "keep": keep and not more}
        answer, _ = await channel.request(header, b"".join(data for _, data in files[part]), deadline_s)
        if "fault" in answer:
            raise SandboxError(
                f"the template cannot be installed: {answer['fault'][1]}", field="template", received=rows[:3]
            )
        more = True
