"""The tokenizer of a run, without anything of its model."""

from __future__ import annotations

from pathlib import Path

from etude.observe import RunDirectory
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer

RUN_TOKENIZER = "tokenizer"
"""Directory of a run that trained one."""


def run_tokenizer(run: RunDirectory) -> Tokenizer | None:
    """The tokenizer of a run, its own or that of the checkpoint it began with; None where it has none."""
    initial = run.config.initial_checkpoint
    for directory in (run.path / RUN_TOKENIZER, Path(initial) if initial else None):
        if directory is not None and (directory / TOKENIZER_FILE).is_file():
            return Tokenizer.load(directory)
    return None
