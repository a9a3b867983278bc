"""`etude report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.observe import RunDirectory


def report_command(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Draw the plots and write report.html again. Works while the run is in progress."""
    directory = RunDirectory.open(run)
    # Heavy: matplotlib comes with it.
    from etude.observe.report import build_report

    typer.echo(build_report(directory))
