"""`etude sandbox run`, `doctor` and `image`, which need no server. The others are in `sandbox_server.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from etude.cli.exits import EXIT_MISTAKE, error_console
from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.cli.sandbox_image import image_app
from etude.cli.sandbox_options import (
    AllowOption,
    AllowPrivateOption,
    BackendOption,
    CommandArgument,
    CommandTimeOption,
    DirectoryOption,
    DiskOption,
    ImageOption,
    MemoryOption,
    StateOption,
    exit_code,
    forward_output,
    make_network,
    make_resources,
    make_template,
    shell_command,
)
from etude.cli.sandbox_server import add_server_commands
from etude.errors import EtudeError, UserError

sandbox_app = typer.Typer(
    name="sandbox", help="Run, fork, snapshot and serve sandboxes.", no_args_is_help=True
)


_CHECKED = ("local", "gvisor", "vm", "docker", "podman")
_TRIAL_S = 180.0
"""Time limit of a trial: the first boot of an emulated guest takes long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of trying one backend on this machine."""

    backend: str
    works: bool
    start_s: float | None
    """Duration of start and first command in the trial."""
    isolation: str
    problems: tuple[str, ...]
    """Problems, each with its fix."""


@sandbox_app.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: CommandArgument,
    backend: BackendOption = "local",
    directory: DirectoryOption = None,
    image: ImageOption = None,
    allow: AllowOption = None,
    allow_private: AllowPrivateOption = None,
    memory_mb: MemoryOption = 512,
    disk_mb: DiskOption = 256,
    timeout_s: CommandTimeOption = 600.0,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Directory to copy the workspace's files to afterwards."),
    ] = None,
    state: StateOption = None,
) -> None:
    """Run one command in a fresh sandbox.

    The exit code is that of the command, or 124 if it ran into the timeout.
    """

    if save is not None and save.exists() and not save.is_dir():
        raise UserError("is not a directory", field="--save", received=str(save), fix="name a directory")

    async def work() -> int:
        from etude.sandbox.backends import open_backend
        from etude.sandbox.commands import MEMORY_EXCEEDED

        opened = open_backend(backend, state, allow_private or ())
        try:
            template = make_template(directory, image, state)
            sandbox = await opened.create(template, make_resources(memory_mb, disk_mb), make_network(allow))
            result = await sandbox.commands.run(shell_command(command), timeout_s, on_output=forward_output)
            if save is not None:
                await sandbox.files.download(".", save)
        finally:
            await opened.close()
        if MEMORY_EXCEEDED in result.stderr:
            error_console().print(f"killed: used more than {memory_mb} MB of memory", markup=False)
        if result.timed_out:
            error_console().print(f"ended at the timeout of {timeout_s:g} s", markup=False)
        return exit_code(result)

    raise typer.Exit(asyncio.run(work()))


@sandbox_app.command("doctor")
def doctor_command(as_json: JsonOption = False, state: StateOption = None) -> None:
    """Try every sandbox backend, and say which of them work here and what the others need.

    The exit code is 2 if none works.
    """

    async def work() -> list[Finding]:
        return [await _examine(name, state) for name in _CHECKED]  # one after the other

    findings = asyncio.run(work())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        _print_findings(findings)
    if not any(finding.works for finding in findings):
        raise typer.Exit(EXIT_MISTAKE)


async def _examine(name: str, state: Path | None) -> Finding:
    """Tries a backend: starts a sandbox, runs a command, kills it."""
    from etude.sandbox.backends import open_backend

    try:
        backend = open_backend(name, state)
    except EtudeError as error:
        return Finding(name, False, None, "", (str(error),))
    isolation, took_s = backend.capabilities().isolation, None
    try:
        problems = list(await asyncio.to_thread(backend.doctor))
        if not problems:
            async with asyncio.timeout(_TRIAL_S):
                start_s = time.perf_counter()
                sandbox = await backend.create()
                result = await sandbox.commands.run("echo works", timeout_s=_TRIAL_S)
            if result.stdout == "works\n":
                took_s = time.perf_counter() - start_s
            else:
                problems = [f"a command answered {result!r}"]
    except TimeoutError:
        problems = [f"no sandbox within {_TRIAL_S:.0f} s"]
    except EtudeError as error:
        problems = [str(error)]
    finally:
        await backend.close()
    return Finding(name, took_s is not None, took_s, isolation, tuple(problems))


def _print_findings(findings: list[Finding]) -> None:
    rows: list[tuple[object, ...]] = []
    for finding in findings:
        took = None if finding.start_s is None else f"{finding.start_s * 1e3:.0f} ms"
        works = Text("yes", style="green") if finding.works else Text("no", style="red")
        rows.append((finding.backend, works, finding.isolation, took))
    console = output_console()
    print_table(console, ("backend", "works", "isolation", "start + command"), rows)
    for finding in findings:
        for problem in finding.problems:
            console.print(Text.assemble((f"{finding.backend}: ", "bold"), problem), soft_wrap=True)


sandbox_app.add_typer(image_app)
add_server_commands(sandbox_app)
