"""`etude doctor`: the capabilities of this machine, and problems that prevent Étude from running on it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from etude.cli.doctor_parity import parity_command
from etude.cli.doctor_parts import Part, find_parts, print_parts
from etude.cli.exits import EXIT_MISTAKE
from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.errors import ResourceError
from etude.observe import describe_machine, versions
from etude.observe.machine import available_cores, available_memory_bytes
from etude.observe.run_directory import check_resources

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
        "parts": [dataclasses.asdict(part) for part in find_parts()],
    }


def _describe_kernels() -> str:
    """The engine's kernels on this machine, and why they are used."""
    from etude.inference.native import load_library

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
    print_parts(console, [Part(**part) for part in found["parts"]])
    console.print()
    for problem in found["problems"]:
        console.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if not found["problems"]:
        console.print(Text("no problems found: sandboxes can be isolated here", style="green"))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
