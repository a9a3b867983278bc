"""What is looked at before a run has a directory."""

from __future__ import annotations

from pathlib import Path

from etude.config import RunConfig
from etude.controller.compute import choose_kernels
from etude.controller.numerics import settle_numerics
from etude.errors import ConfigError
from etude.tokens.tokenizer import TOKENIZER_FILE


def check_start(config: RunConfig) -> None:
    """Refuses, before a run directory is made, what would end the run at once. Raises ConfigError for an
    initial checkpoint that is none, ResourceError for native kernels that cannot be had."""
    if config.initial_checkpoint is not None:
        directory = Path(config.initial_checkpoint)
        missing = [name for name in ("config.json", TOKENIZER_FILE) if not (directory / name).exists()]
        if missing:
            raise ConfigError(
                f"has no {missing[0]}",
                field="initial_checkpoint",
                received=config.initial_checkpoint,
                fix="name a checkpoint with its tokenizer, such as runs/NAME/checkpoints/midtrained",
            )
    choose_kernels(settle_numerics(config).engine.kernels)
