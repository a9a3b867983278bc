"""`etude doctor parity`: the difference between trainer and engine, for any checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.cli.serving_options import CacheDtypeOption, KernelsOption, NumberFormat, WeightDtypeOption
from etude.config import parse_config
from etude.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from etude.controller.parity_report import ParityReport
    from etude.model.loading import AnyModel

EXIT_APART = 1


def parity_command(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a Hugging Face checkpoint or run.")],
    engine: Annotated[
        Literal["etude", "vllm"], typer.Option(help="Engine to compare with the trainer.")
    ] = "etude",
    kernels: KernelsOption = "auto",
    numerics: Annotated[
        Literal["fast", "invariant"], typer.Option(help="Numerics; invariant: equal in every bit.")
    ] = "fast",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on.")] = "auto",
    dtype: Annotated[NumberFormat, typer.Option(help="Number format of the weights.")] = "auto",
    cache_dtype: CacheDtypeOption = "auto",
    weight_dtype: WeightDtypeOption = "auto",
    vllm_python: Annotated[str, typer.Option(help="Python interpreter with vLLM, to start it with.")] = "",
    vllm_url: Annotated[str, typer.Option(help="Address of a running vLLM server instead.")] = "",
    text: Annotated[
        Path | None, typer.Option(help="Text file with the prompts. Default: random tokens.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens per sequence, prompt included.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to sample and score.")] = 8,
    limit: Annotated[float, typer.Option(min=0, help="Largest divergence (k3) that passes.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random prompts.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Sample from a checkpoint with an engine, score the same tokens with the trainer, and compare.

    The exit code is 1 if the two differ by more than --limit.
    """
    config = parse_config(
        {
            "device": device,
            "dtype": dtype,
            "numerics": numerics,
            "engine": {
                "backend": engine,
                "kernels": kernels,
                "cache_dtype": cache_dtype,
                "weight_dtype": weight_dtype,
                "vllm": {"python": vllm_python, "url": vllm_url},
            },
        }
    )
    # Heavy: torch comes with it.
    from etude.controller.parity_report import measure_parity

    model, prompts = _read(checkpoint, text, sequences, tokens, seed)
    report = asyncio.run(measure_parity(model, config, prompts, tokens))
    passed = report.passes(limit, exact=numerics == "invariant")
    if as_json:
        print_json({**report.to_json(), "limit": limit, "numerics": numerics, "passed": passed})
    else:
        _print(report, limit, exact=numerics == "invariant", passed=passed)
    if not passed:
        raise typer.Exit(EXIT_APART)


def _read(
    directory: Path, text: Path | None, num_sequences: int, num_tokens: int, seed: int
) -> tuple[AnyModel, list[NDArray[np.int32]]]:
    """The model, and prompts of at most half a sequence. Raises CheckpointError, UserError."""
    from etude.controller.evaluate import load_any
    from etude.controller.parity_report import random_prompts, text_prompts
    from etude.model import LanguageModel

    tokenizer, model = load_any(directory, "CHECKPOINT", with_tokenizer=text is not None)
    longest = model.config.max_positions if isinstance(model, LanguageModel) else model.max_positions
    if num_tokens >= longest:
        raise UserError(
            "exceeds the model's longest sequence",
            field="--tokens",
            received=num_tokens,
            fix=f"set it to {longest - 1} or less",
        )
    if text is None or tokenizer is None:
        return model, random_prompts(model.vocab_size, num_sequences, seed)
    try:
        given = tokenizer.encode(text.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field="--text", received=str(text)) from error
    return model, text_prompts(given, num_sequences, num_tokens // 2)


def _print(report: ParityReport, limit: float, *, exact: bool, passed: bool) -> None:
    console = output_console()
    rows: list[tuple[object, ...]] = []
    for name, found in report.figures.items():
        decides = exact or name in report.deciding
        cells = (f"{found.k3:.2e}", f"{found.p99:.2e}", f"{found.max:.2e}", f"{found.differing:.1%}")
        rows.append((Text(name, style="bold" if decides else "dim"), f"{found.num_tokens:,}", *cells))
    headings = ("trainer against engine", "tokens", "k3", "99 % within", "at most", "not equal")
    print_table(console, headings, rows, range(1, 6))
    if report.routes_differing is not None:
        console.print(f"positions with different experts: {report.routes_differing:.3%}")
    wanted = "equal in every bit" if exact else f"k3 within {limit:g}"
    verdict = ("passed: ", "green") if passed else ("failed: not ", "bold red")
    console.print(Text.assemble(verdict, wanted))
