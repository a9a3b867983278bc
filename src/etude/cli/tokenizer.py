"""`etude tokenizer`: vocabularies for models from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.output import output_console
from etude.config import SourceConfig
from etude.errors import ConfigError

tokenizer_app = typer.Typer(
    name="tokenizer", help="Vocabularies for models that start from nothing.", no_args_is_help=True
)


@tokenizer_app.callback()
def tokenizer_group() -> None:
    """Vocabularies for models that start from nothing."""


@tokenizer_app.command("train")
def train_command(
    data: Annotated[
        list[Path], typer.Option("--data", help="A JSONL or Parquet file, or a directory; repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory for tokenizer.json; must not have one.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", min=320, help="Tokens, at most.")] = 4096,
    column: Annotated[str, typer.Option(help="Column or key of a text.")] = "text",
    pattern: Annotated[str, typer.Option(help="Which files of a directory.")] = "**/*.py",
) -> None:
    """Learn a byte-level BPE from texts, with the tags of sessions and of filling in as single tokens."""
    # Heavy: torch comes with it.
    from etude.controller.corpora import find_sources, train_source_tokenizer
    from etude.tokens.tokenizer import TOKENIZER_FILE

    if (out / TOKENIZER_FILE).exists():
        raise ConfigError(
            "exists already", field="--out", received=str(out / TOKENIZER_FILE), fix="name another directory"
        )
    sources = {
        f"data{number}": SourceConfig(path=str(path), column=column, pattern=pattern)
        for number, path in enumerate(data)
    }
    tokenizer = train_source_tokenizer(find_sources(sources), vocab_size)
    tokenizer.save(out)
    output_console().print(f"{tokenizer.vocab_size:,} tokens in {out}", markup=False, soft_wrap=True)
