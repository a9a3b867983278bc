"""`etude model`: import and inspect published models."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.checkpoint import Dtype, TargetArgument
from etude.cli.output import JsonOption, output_console, print_json
from etude.errors import CheckpointError

model_app = typer.Typer(name="model", help="Import and inspect published models.", no_args_is_help=True)


@model_app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="GGUF file or Hugging Face directory.", show_default=False)],
    target: TargetArgument,
    dtype: Annotated[Dtype, typer.Option(help="Number format to keep the weights in.")] = "float32",
    json: JsonOption = False,
) -> None:
    """Check a published model and write it as a Hugging Face directory, with a hash of each file.

    It holds the weights, config.json, tokenizer, chat template and generation settings. GGUF is dequantised
    by the gguf package (pip install 'etude[models]'). Start a run with --set initial_checkpoint=TARGET.
    """
    import torch

    from etude.training.checkpoints.importing import import_model

    if not source.exists():
        raise CheckpointError("does not exist", field="SOURCE", received=str(source), fix="check the path")
    import_model(source, target, getattr(torch, dtype))
    show_command(target, json)


@model_app.command("show")
def show_command(
    directory: Annotated[Path, typer.Argument(help="Hugging Face directory.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Show what a Hugging Face directory holds: architecture, size, window, tokenizer and chat template."""
    from etude.training.checkpoints.importing import describe_model

    found = describe_model(directory)
    if json:
        print_json(asdict(found))
        return
    computed = f"{found.architecture}, {found.parameters:,} parameters, computed natively"
    foreign = f"trains through transformers, samples through vLLM ({found.foreign})"
    lines = {
        "model": computed if found.architecture else foreign,
        "window": f"{found.window:,} tokens",
        "weights": f"{found.weight_bytes:,} bytes",
        "tokenizer": f"{found.tokens:,} tokens, {found.control_tokens} of them control tokens",
        "chat template": found.chat_template_error or ("yes" if found.has_chat_template else "none"),
    }
    console = output_console()
    for name, value in lines.items():
        console.print(f"{name:14}{value}", markup=False, soft_wrap=True)
