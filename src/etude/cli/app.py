"""The application: which commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

import etude
from etude.cli.agent import agent_command
from etude.cli.bench import bench_app
from etude.cli.checkpoint import checkpoint_app
from etude.cli.config import config_app
from etude.cli.doctor import doctor_app
from etude.cli.environment import env_app
from etude.cli.evaluate import eval_command
from etude.cli.exits import ErrorReportingGroup
from etude.cli.plan import plan_command
from etude.cli.pretrain import pretrain_command
from etude.cli.record import record_app
from etude.cli.relay import relay_command
from etude.cli.report import report_command
from etude.cli.route import route_app
from etude.cli.sample import sample_command
from etude.cli.sandbox import sandbox_app
from etude.cli.serve import serve_command
from etude.cli.sft import sft_command
from etude.cli.tasks import tasks_app
from etude.cli.tokenizer import tokenizer_app
from etude.cli.train import train_command
from etude.cli.trajectory import trajectory_app
from etude.cli.workers import workers_command

app = typer.Typer(
    name="etude",
    help="Reinforcement learning for coding agents, in the environment in which they will work.",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("train")(train_command)
app.command("plan")(plan_command)
app.command("pretrain")(pretrain_command)
app.command("sft")(sft_command)
app.command("eval")(eval_command)
app.command("agent")(agent_command)
app.command("serve")(serve_command)
app.command("relay")(relay_command)
app.command("sample")(sample_command)
app.command("report")(report_command)
app.command("workers")(workers_command)
app.add_typer(route_app)
app.add_typer(doctor_app)
app.add_typer(trajectory_app)
app.add_typer(tasks_app)
app.add_typer(config_app)
app.add_typer(sandbox_app)
app.add_typer(record_app)
app.add_typer(env_app)
app.add_typer(bench_app)
app.add_typer(checkpoint_app)
app.add_typer(tokenizer_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"etude {etude.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning for coding agents, in the environment in which they will work."""


def main() -> None:
    """Entry point.

    Exit codes: 0 done, 2 a mistake to mend, 3 the system failed, 4 something was kept back, 130 interrupted,
    141 nobody reads the output.
    """
    app()
