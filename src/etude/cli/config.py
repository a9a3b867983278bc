"""`etude config show` and `etude config docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from etude.config import RunConfig, dump_config, load_config
from etude.errors import UserError

FileArgument = Annotated[Path | None, typer.Argument(help="TOML file, such as configs/quickstart.toml.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value. Repeatable.")
]
FileOption = Annotated[Path | None, typer.Option("--config", help="The same file, as in etude train.")]

_INTRODUCTION = """# Configuration

Every field of a run's configuration, with its default. Defaults < TOML file < `--set section.field=value`.
Unknown keys are refused; the resolved configuration is stored with each run as `config.toml`.

This file is generated: `etude config docs > docs/config.md`.
"""

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

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
    typer.echo(_INTRODUCTION + "".join(_section(RunConfig, ())), nl=False)


def _section(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    """A section's table, then its subsections."""
    inner: list[tuple[str, type[BaseModel]]] = []
    title, meaning = f"`[{'.'.join(path)}]`" if path else "Top level", (model.__doc__ or "").split()
    yield f"\n## {title}\n\n{' '.join(meaning)}\n\n"
    yield "| field | default | allowed | meaning |\n|---|---|---|---|\n"
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner.append((name, field.annotation))
            continue
        named = _named_sections(field)
        if named is not None:
            inner.append((f"{name}.NAME", named))
            continue
        cells = (f"`{name}`", _default(field), _allowed(field), _described(model, name))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    for name, section in inner:
        yield from _section(section, (*path, name))


def _named_sections(field: FieldInfo) -> type[BaseModel] | None:
    """The type of a field's sections by user-defined names; None for other fields."""
    kind = get_args(field.annotation)[1] if get_origin(field.annotation) is dict else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _described(model: type[BaseModel], name: str) -> str:
    """The field's documentation; an overridden field inherits that of the section it comes from."""
    for owner in model.__mro__:
        fields: dict[str, FieldInfo] = getattr(owner, "model_fields", {})
        if name in fields and fields[name].description:
            return " ".join(str(fields[name].description).split())
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{_toml(field.get_default(call_default_factory=True))}`"


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value)


def _allowed(field: FieldInfo) -> str:
    """Type and bounds in words."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    kind = getattr(field.annotation, "__name__", str(field.annotation))
    name = str(field.annotation) if get_args(field.annotation) else kind
    bounds = [
        f"{sign} {getattr(constraint, bound)}"
        for constraint in field.metadata
        for bound, sign in _BOUNDS.items()
        if getattr(constraint, bound, None) is not None
    ]
    return ", ".join([name, *bounds])
