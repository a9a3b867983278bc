"""The tokenizer of a run, without anything of its model."""

from __future__ import annotations

from pathlib import Path

from etude.observe import RunDirectory
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer

RUN_TOKENIZER = "tokenizer"
"""Directory of a run that trained one."""


def run_tokenizer(run: RunDirectory) -> Tokenizer | None:
    """The tokenizer of a run, its own or that of the checkpoint it began with; None where it has none."""
    own = run.path / RUN_TOKENIZER
    if (own / TOKENIZER_FILE).is_file():
        return Tokenizer.load(own)
    initial = run.config.initial_checkpoint
    if initial is not None and (Path(initial) / TOKENIZER_FILE).is_file():
        return Tokenizer.load(Path(initial))
    return None
