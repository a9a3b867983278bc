"""The model that a run begins with, where a checkpoint is given: what it is decides the configuration."""

from __future__ import annotations

from pathlib import Path

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.model.loading import read_architecture, read_window
from etude.tokens.tokenizer import TOKENIZER_FILE


def settle_model(config: RunConfig) -> RunConfig:
    """The configuration with the model of `initial_checkpoint`, if there is one: the section `model` then
    says what its config.json says. For an architecture that is not ours only `max_positions` is known.

    Raises ConfigError where the rest of the configuration does not fit it, CheckpointError.
    """
    if config.initial_checkpoint is None:
        return config
    directory = Path(config.initial_checkpoint)
    missing = [name for name in ("config.json", TOKENIZER_FILE) if not (directory / name).exists()]
    if missing:
        raise ConfigError(
            f"has no {missing[0]}",
            field="initial_checkpoint",
            received=config.initial_checkpoint,
            fix="name a checkpoint with its tokenizer, such as runs/NAME/checkpoints/midtrained",
        )
    window = read_window(directory)
    if config.agent.max_tokens > window:
        raise ConfigError(
            f"the model of initial_checkpoint has a window of {window} tokens",
            field="agent.max_tokens",
            received=config.agent.max_tokens,
            fix="set it lower, or begin with another checkpoint",
        )
    own = read_architecture(directory)
    if own is None:
        _check_foreign(config, directory)
        own = config.model.model_copy(update={"max_positions": window})
    return config.model_copy(update={"model": own})


def is_foreign(config: RunConfig) -> bool:
    """Whether the run's model is one of transformers', and not defined here."""
    return (
        config.initial_checkpoint is not None and read_architecture(Path(config.initial_checkpoint)) is None
    )


def _check_foreign(config: RunConfig, directory: Path) -> None:
    """What needs an architecture of our own is refused before anything is made. Raises ConfigError."""
    wants = (
        (config.engine.backend != "vllm", "engine.backend", config.engine.backend, 'set it to "vllm"'),
        (config.rl.loss.balance_weight > 0, "rl.loss.balance_weight", None, "set it to 0"),
    )
    for is_wanted, field, received, fix in wants:
        if is_wanted:
            raise ConfigError(
                f"needs an architecture that is defined here, and {directory.name}'s is not",
                field=field,
                received=received,
                fix=f"{fix}: such models train through transformers and sample through vLLM",
            )
