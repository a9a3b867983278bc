"""`etude checkpoint`: inspect, verify and export checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.errors import CheckpointError
from etude.observe import RunDirectory

checkpoint_app = typer.Typer(
    name="checkpoint", help="Inspect, verify and export checkpoints.", no_args_is_help=True
)

PathArgument = Annotated[Path, typer.Argument(help="Directory of a checkpoint or run.", show_default=False)]
SourceArgument = Annotated[
    Path, typer.Argument(help="Directory of a checkpoint, Hugging Face model or run.", show_default=False)
]
TargetArgument = Annotated[Path, typer.Argument(help="Directory to create.", show_default=False)]
Dtype = Literal["float32", "bfloat16", "float16"]
"""Number formats of weights."""


@checkpoint_app.command("show")
def show_command(path: PathArgument, json: JsonOption = False) -> None:
    """Show what a checkpoint, or each checkpoint of a run, holds: stage, step, model and size.

    The files are not checked; `etude checkpoint verify` does that.
    """
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
    """Compare every file of a checkpoint, or of each checkpoint of a run, with its stored hash.

    The exit code is 2 if a file is damaged, missing or unfinished.
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
        raise CheckpointError(
            "is damaged, incomplete or without hashes",
            field="checkpoint",
            received=flawed,
            fix=_fix_for(path, whole),
        )


def _fix_for(path: Path, whole: list[str]) -> str:
    """The error's fix for damaged checkpoints. `whole`: names of the intact ones."""
    from etude.training.checkpoints.files import DIGESTS
    from etude.training.checkpoints.saving import read_state

    if (path / "config.json").is_file() and not (path / DIGESTS).is_file():
        return "published models have no digests.json: `etude model import` checks one and writes its hashes"
    if not (path / "config.toml").is_file():
        return "restore it from a copy; in a run, --resume continues from the newest intact checkpoint"
    resumable = [name for name in whole if read_state(path / "checkpoints" / name)]
    if resumable:
        return f"continue with --resume, which uses an intact checkpoint: {', '.join(resumable)}"
    kept = f"; these checkpoints are intact and can be used: {', '.join(whole)}" if whole else ""
    return f"no intact checkpoint can be resumed: restore a copy, or start another run{kept}"


@checkpoint_app.command("export")
def export_command(
    source: SourceArgument,
    target: TargetArgument,
    dtype: Annotated[Dtype, typer.Option(help="Number format to write the weights in.")] = "bfloat16",
    max_file_gb: Annotated[
        float, typer.Option(min=1e-6, help="Largest weight file in GB (10^9 bytes).")
    ] = 5.0,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Base model of adapters. Not needed for a checkpoint inside a run.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a model as a Hugging Face directory that transformers, vLLM and other engines can read.

    It holds the weights with their index, config.json, generation settings, tokenizer and chat template.
    Adapters are merged with their base model.
    """
    import torch

    from etude.training.checkpoints.exchange import convert_model

    directory = _checkpoints(source)[0]
    tokenizers = [parent / "tokenizer" for parent in list(directory.resolve().parents)[:3]]
    if not all((directory / name).is_file() for name in ("config.json", "tokenizer.json")):
        initial = _initial_of(directory)
        tokenizers += [] if initial is None else [initial]
        base = base or (None if (directory / "config.json").is_file() else initial)
    model = convert_model(directory, target, getattr(torch, dtype), int(max_file_gb * 1e9), tokenizers, base)
    count = sum(parameter.numel() for parameter in model.parameters())
    console = output_console()
    console.print(f"{count:,} parameters in {dtype}: {target}", markup=False, soft_wrap=True)


def _initial_of(directory: Path) -> Path | None:
    """The initial model of reinforcement learning or fine-tuning in the run that contains a checkpoint."""
    run = next(
        (parent for parent in directory.resolve().parents[:3] if (parent / "config.toml").is_file()), None
    )
    if run is None:
        return None
    initial = RunDirectory.open(run).config.initial_checkpoint
    return run / "checkpoints" / "midtrained" if initial is None else Path(initial)


def _checkpoints(path: Path) -> list[Path]:
    """A checkpoint itself, or all usable checkpoints of a run, the most important one first."""
    if (path / "config.toml").is_file():
        root = path / "checkpoints"
        found = [file.parent for name in ("config.json", "state.pt") for file in root.rglob(name)]
        order = {"final": 0, "midtrained": 1, "latest": 2}
        usable = {p for p in found if not _is_unusable(p.relative_to(root).parts)}
        found = sorted(usable, key=lambda p: (order.get(p.name, len(order)), p.name))
    else:
        found = [path] if any((path / name).is_file() for name in ("config.json", "state.pt")) else []
    if not found:
        raise CheckpointError(
            "is not a checkpoint: it has neither config.json nor a run's config.toml",
            field="checkpoint",
            received=str(path),
            fix="name a checkpoint or Hugging Face directory, or a run directory with checkpoints",
        )
    return found


def _is_unusable(parts: tuple[str, ...]) -> bool:
    """Whether a checkpoint is half-written, or known to be damaged."""
    return parts[0] == "damaged" or any(part.startswith(".") for part in parts)


def _name(directory: Path, asked: Path) -> str:
    return directory.name if directory == asked else directory.relative_to(asked / "checkpoints").as_posix()


def _architecture(directory: Path) -> str:
    """`model_type` of its config.json; empty without a model."""
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
    names = list(rows[0])
    figures = [number for number, name in enumerate(names) if name in ("step", "score", "ranks", "bytes")]
    print_table(output_console(), names, ([_cell(row, name) for name in names] for row in rows), figures)


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if name == "bytes" else f"{value:.4g}" if isinstance(value, float) else str(value)
