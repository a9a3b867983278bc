"""Context extension in stages: rotary embeddings are rescaled while training continues."""

from __future__ import annotations

import math

from etude.config import ModelConfig, StageConfig
from etude.errors import ConfigError
from etude.model import DraftLayer, DraftLayers, LanguageModel, LatentBlock
from etude.model.rotary import attention_scale

_CHANGED = ("max_positions", "rope_factor", "rope_original_positions", "rope_theta")
"""Fields of a model's configuration that a stage changes."""


def extended(config: ModelConfig, stage: StageConfig) -> ModelConfig:
    """The model's configuration in a stage. Raises ConfigError for a stage that shortens the window, and for
    YaRN on top of another scaling of positions."""
    ratio = stage.window / config.max_positions
    if ratio < 1:
        raise ConfigError(
            f"is shorter than the model's, which has {config.max_positions} tokens",
            field="stages.window",
            received=stage.window,
            fix="make each stage's window longer than the one before",
        )
    changes: dict[str, float | int] = {"max_positions": stage.window}
    if stage.rope == "yarn":
        if config.rope_factor > 1 and config.rope_scaling != "yarn":
            raise ConfigError(
                f"the model's positions are already scaled with rope_scaling={config.rope_scaling!r}",
                field="stages.rope",
                received=stage.rope,
                fix='set it to "base", or to "keep"',
            )
        original = config.rope_original_positions if config.rope_factor > 1 else config.max_positions
        changes |= {"rope_factor": stage.window / original, "rope_original_positions": original}
    elif stage.rope == "base":
        dim = config.rope_dim
        raised = config.rope_theta * ratio ** (dim / (dim - 2)) if dim > 2 else config.rope_theta * ratio
        changes["rope_theta"] = stage.rope_theta or raised
    return config.model_copy(update=changes)


def with_context_of(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """`config` with the fields that stages change taken from `other`."""
    return config.model_copy(update={name: getattr(other, name) for name in _CHANGED})


def set_context(model: LanguageModel, config: ModelConfig, drafts: DraftLayers | None = None) -> None:
    """Sets the window and the rotary embedding of a model, and of its draft layers, to those of `config`, in
    place; no weight changes."""
    model.config = config
    model.reset_rotation()
    blocks = [*model.blocks]
    if drafts is not None:
        blocks += [layer.block for layer in drafts.layers if isinstance(layer, DraftLayer)]
    for block in blocks:
        if isinstance(block, LatentBlock):
            block.scale = attention_scale(config) * math.sqrt(config.key_dim)
