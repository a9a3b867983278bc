"""`etude report` and `etude workers`: commands on the directory of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.errors import ConfigError
from etude.observe import RunDirectory
from etude.observe.workers import WantedWorkers, WorkerFiles


def report_command(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Draw the plots and write report.html again. Works while the run is in progress."""
    directory = RunDirectory.open(run)
    # Heavy: matplotlib comes with it.
    from etude.observe.report import build_report

    typer.echo(build_report(directory))


def workers_command(
    run: Annotated[Path, typer.Argument(help="Directory of a run that is in progress.")],
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="[NUMBER|auto]",
            help="Number of workers from now on; auto uses the number in the run's configuration.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rollout workers of a run over Ray, or change their number while it is in progress."""
    files = WorkerFiles(RunDirectory.open(run).path)
    if wanted is not None:
        files.write_request(_number(wanted))
        return
    status = files.read_status()
    if as_json:
        print_json(status)
        return
    title = f"wanted: {status['wanted']}"
    print_table(output_console(), ("worker", "state"), status["workers"].items(), title=title)


def _number(text: str) -> WantedWorkers:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            "is not a number", field="workers", received=text, fix="give a number, or auto"
        ) from None
