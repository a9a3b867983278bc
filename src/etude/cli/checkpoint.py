"""`etude checkpoint`: look at checkpoints, check them, bring models in and out."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from etude.cli.output import output_console, print_json
from etude.errors import CheckpointError
from etude.observe import RunDirectory

checkpoint_app = typer.Typer(
    name="checkpoint", help="Look at checkpoints, check them, bring models in and out.", no_args_is_help=True
)

PathArgument = Annotated[Path, typer.Argument(help="Checkpoint directory, or a run.", show_default=False)]
SourceArgument = Annotated[
    Path, typer.Argument(help="Checkpoint or Hugging Face directory, or a run.", show_default=False)
]
TargetArgument = Annotated[Path, typer.Argument(help="A directory that does not exist.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


class Dtype(StrEnum):
    """Number formats of weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@checkpoint_app.command("show")
def show_command(path: PathArgument, json: JsonOption = False) -> None:
    """What a checkpoint holds, or all of a run: stage, step, model, size. Nothing is checked."""
    from etude.training.checkpoints.files import DIGESTS
    from etude.training.checkpoints.saving import read_state
    from etude.training.checkpoints.shards import num_writers

    rows: list[dict[str, Any]] = []
    for directory in _checkpoints(path):
        state = read_state(directory) or {}
        files = [file for file in directory.rglob("*") if file.is_file()]
        rows.append(
            {
                "checkpoint": _name(directory, path),
                "stage": state.get("stage", ""),
                "step": state.get("step", ""),
                "score": state.get("score", ""),
                "resumable": bool(state),
                "model": _architecture(directory),
                "ranks": num_writers(directory) or 1,
                "bytes": sum(file.stat().st_size for file in files),
                "sealed": (directory / DIGESTS).is_file(),
            }
        )
    _print_rows(rows, json)


@checkpoint_app.command("verify")
def verify_command(path: PathArgument, json: JsonOption = False) -> None:
    """Compare every file of a checkpoint, or of all of a run, with the hash that it was written with.

    Ends with exit code 2 if anything is damaged, missing or unfinished.
    """
    from etude.training.checkpoints import find_flaws

    rows: list[dict[str, Any]] = []
    for directory in _checkpoints(path):
        name = _name(directory, path)
        flaws = find_flaws(directory)
        rows += [{"checkpoint": name, "state": str(f.flaw), "file": str(f.file)} for f in flaws]
        if not flaws:
            rows.append({"checkpoint": name, "state": "whole", "file": ""})
    _print_rows(rows, json)
    flawed = sorted({row["checkpoint"] for row in rows if row["state"] != "whole"})
    if flawed:
        whole = [row["checkpoint"] for row in rows if row["state"] == "whole"]
        raise CheckpointError("not whole", field="checkpoint", received=flawed, fix=_way_on(path, whole))


def _way_on(path: Path, whole: list[str]) -> str:
    """What is left to do where checkpoints are damaged. `whole`: names of those that are not."""
    from etude.training.checkpoints.saving import read_state

    if not (path / "config.toml").is_file():
        return "fetch a copy; in a run, --resume goes on from the newest whole one, if there is one"
    resumable = [name for name in whole if read_state(path / "checkpoints" / name)]
    if resumable:
        return f"--resume goes on from one that is whole, by itself: {', '.join(resumable)}"
    kept = f"; what is whole can still be used: {', '.join(whole)}" if whole else ""
    return f"none that is whole can be gone on from: restore a copy, or begin another run{kept}"


@checkpoint_app.command("export")
def export_command(
    source: SourceArgument,
    target: TargetArgument,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.BFLOAT16,
    max_file_gb: Annotated[float, typer.Option(min=1e-6, help="Larger models become several files.")] = 5.0,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Model that adapters were trained on; known for those in a run.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a model as others read it: transformers, vLLM, any engine.

    Weights with their index, config.json, generation settings, tokenizer and chat template. Adapters are
    merged with their base.
    """
    _convert(source, target, dtype, max_file_gb, base)


@checkpoint_app.command("import")
def import_command(
    source: SourceArgument,
    target: TargetArgument,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.FLOAT32,
) -> None:
    """Read a Hugging Face directory with every check, and keep it with a hash of each file.

    A run begins with it by --set initial_checkpoint=TARGET.
    """
    _convert(source, target, dtype, 5.0)


def _convert(source: Path, target: Path, dtype: Dtype, max_file_gb: float, base: Path | None = None) -> None:
    import torch

    from etude.training.checkpoints.exchange import convert_model

    directory = _checkpoints(source)[0]
    tokenizers = [parent / "tokenizer" for parent in list(directory.resolve().parents)[:3]]
    base = base or _base_of(directory)
    model = convert_model(directory, target, getattr(torch, dtype), int(max_file_gb * 1e9), tokenizers, base)
    count = sum(parameter.numel() for parameter in model.parameters())
    console = output_console()
    console.print(f"{count:,} parameters in {dtype}: {target}", markup=False, soft_wrap=True)


def _base_of(directory: Path) -> Path | None:
    """What reinforcement learning began with, of the run that a checkpoint without a model lies in."""
    if (directory / "config.json").is_file():
        return None
    run = next(
        (parent for parent in directory.resolve().parents[:3] if (parent / "config.toml").is_file()), None
    )
    if run is None:
        return None
    initial = RunDirectory.open(run).config.initial_checkpoint
    return run / "checkpoints" / "midtrained" if initial is None else Path(initial)


def _checkpoints(path: Path) -> list[Path]:
    """A checkpoint itself; of a run all that can be used, the model that it is known by first."""
    if (path / "config.toml").is_file():
        root = path / "checkpoints"
        found = [file.parent for name in ("config.json", "state.pt") for file in root.rglob(name)]
        order = {"final": 0, "midtrained": 1, "latest": 2}
        usable = {p for p in found if not _put_aside(p.relative_to(root).parts)}
        found = sorted(usable, key=lambda p: (order.get(p.name, len(order)), p.name))
    else:
        found = [path] if any((path / name).is_file() for name in ("config.json", "state.pt")) else []
    if not found:
        raise CheckpointError(
            "no checkpoint here: neither config.json nor a run's config.toml",
            field="checkpoint",
            received=str(path),
            fix="name a checkpoint or Hugging Face directory, or a run directory with checkpoints",
        )
    return found


def _put_aside(parts: tuple[str, ...]) -> bool:
    """Whether it is half-written, or known as damaged."""
    return parts[0] == "damaged" or any(part.startswith(".") for part in parts)


def _name(directory: Path, asked: Path) -> str:
    return directory.name if directory == asked else directory.relative_to(asked / "checkpoints").as_posix()


def _architecture(directory: Path) -> str:
    """`model_type` of its config.json; empty where there is no model."""
    import json

    path = directory / "config.json"
    if not path.is_file():
        return ""
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("model_type", ""))
    except (ValueError, AttributeError):
        return "damaged"


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right" if name in ("step", "score", "ranks", "bytes") else "left")
    for row in rows:
        table.add_row(*(_cell(row, name) for name in row))
    output_console().print(table)


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if name == "bytes" else f"{value:.4g}" if isinstance(value, float) else str(value)
