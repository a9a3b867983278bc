"""`etude tokenizer`: trains tokenizers for models that start from random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.output import output_console
from etude.config import SourceConfig
from etude.errors import ConfigError

tokenizer_app = typer.Typer(name="tokenizer", no_args_is_help=True)


@tokenizer_app.callback()
def tokenizer_group() -> None:
    """Train tokenizers for models that start from random weights."""


@tokenizer_app.command("train")
def train_command(
    data: Annotated[
        list[Path], typer.Option("--data", help="JSONL or Parquet file, or directory. Repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory for the new tokenizer.json.")],
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", min=320, help="Largest number of tokens.")
    ] = 4096,
    column: Annotated[str, typer.Option(help="Column or key that holds the text.")] = "text",
    pattern: Annotated[str, typer.Option(help="Pattern of the files to read from a directory.")] = "**/*.py",
) -> None:
    """Train a byte-level BPE tokenizer on texts.

    The tags of agent sessions and of fill-in-the-middle become single tokens.
    """
    # Heavy: torch comes with it.
    from etude.controller.corpora import find_sources, train_source_tokenizer
    from etude.tokens.tokenizer import TOKENIZER_FILE

    if (out / TOKENIZER_FILE).exists():
        raise ConfigError(
            "already exists", field="--out", received=str(out / TOKENIZER_FILE), fix="name another directory"
        )
    sources = {
        f"data{number}": SourceConfig(path=str(path), column=column, pattern=pattern)
        for number, path in enumerate(data)
    }
    tokenizer = train_source_tokenizer(find_sources(sources), vocab_size)
    tokenizer.save(out)
    output_console().print(f"{tokenizer.vocab_size:,} tokens in {out}", markup=False, soft_wrap=True)
