"""The application: a table of its commands, of which only the called one is imported."""

from __future__ import annotations

import importlib
import warnings
from typing import Annotated, Any

import typer
from typer.main import get_command, get_group

import etude
from etude.cli.exits import ErrorReportingGroup

_COMMANDS = {
    "train": "train:train_command",
    "plan": "plan:plan_command",
    "pretrain": "pretrain:pretrain_command",
    "sft": "pretrain:sft_command",
    "eval": "evaluate:eval_app",
    "agent": "agent:agent_command",
    "serve": "serve:serve_command",
    "relay": "relay:relay_command",
    "sample": "sample:sample_command",
    "report": "runs:report_command",
    "workers": "runs:workers_command",
    "route": "route:route_app",
    "doctor": "doctor:doctor_app",
    "trajectory": "trajectory:trajectory_app",
    "tasks": "tasks:tasks_app",
    "config": "config:config_app",
    "sandbox": "sandbox:sandbox_app",
    "record": "record:record_app",
    "env": "environment:env_app",
    "checkpoint": "checkpoint:checkpoint_app",
    "model": "model:model_app",
    "tokenizer": "tokenizer:tokenizer_app",
}
"""By name: the module of this package, and the name in it of the command or the group of commands."""


class Application(ErrorReportingGroup):
    """All commands, each created on first use."""

    def __init__(self, **settings: Any) -> None:
        """`settings`: Typer's."""
        super().__init__(**settings)
        self._made: dict[str, Any] = {}
        self.commands = dict.fromkeys(_COMMANDS)  # for suggestions after a mistyped name

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; None if there is none."""
        if cmd_name not in self._made and cmd_name in _COMMANDS:
            self._made[cmd_name] = _command(cmd_name)
        return self._made.get(cmd_name)


def _command(name: str) -> Any:
    module, _, attribute = _COMMANDS[name].partition(":")
    found = getattr(importlib.import_module(f"etude.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        return get_group(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name)(found)
    return get_command(alone)


app = typer.Typer(
    name="etude",
    help="Train coding agents by reinforcement learning in the environment in which they will work.",
    cls=Application,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


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
    """Train coding agents by reinforcement learning in the environment in which they will work."""


def main() -> None:
    """Entry point.

    Exit codes: 0 success, 2 a mistake of the user, 3 a failure of the system, 4 changes were kept back,
    130 interrupted, 141 the reader of the output has closed it.
    """
    warnings.formatwarning = _format_warning
    app()


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {message}\n"
