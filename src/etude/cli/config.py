"""`etude config show` and `etude config docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.reference import config_reference
from etude.config import dump_config, load_config
from etude.errors import UserError

FileArgument = Annotated[Path | None, typer.Argument(help="TOML file, such as configs/quickstart.toml.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value. Repeatable.")
]
FileOption = Annotated[Path | None, typer.Option("--config", help="The same file, as in etude train.")]

config_app = typer.Typer(name="config", help="Show and document configurations.", no_args_is_help=True)


@config_app.command("show")
def show_command(
    file: FileArgument = None,
    config: FileOption = None,
    overrides: SetOption = None,
) -> None:
    """Print the resolved configuration as TOML: of a file, or the defaults."""
    typer.echo(dump_config(load_config(chosen_file(file, config), overrides or [])), nl=False)


def chosen_file(file: Path | None, config: Path | None) -> Path | None:
    """The file named by the argument or by `--config`. Raises UserError if both are given."""
    if file is not None and config is not None:
        raise UserError("names a second file", field="--config", received=str(config), fix="name one file")
    return config if file is None else file


@config_app.command("docs")
def docs_command() -> None:
    """Print the reference of all fields as Markdown, which is docs/config.md."""
    typer.echo(config_reference(), nl=False)
