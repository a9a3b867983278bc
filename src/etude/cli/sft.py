"""`etude sft`."""

from __future__ import annotations

from functools import partial

from etude.cli.pretrain import (
    CheckpointOption,
    ConfigOption,
    DataOption,
    DraftLayersOption,
    JsonOption,
    NameOption,
    OverridesOption,
    ResumeOption,
    merge,
    train_stage,
)
from etude.cli.served_model import make_shelf
from etude.config import load_config


def sft_command(
    config: ConfigOption = None,
    data: DataOption = None,
    checkpoint: CheckpointOption = None,
    overrides: OverridesOption = None,
    name: NameOption = None,
    draft_layers: DraftLayersOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model on sessions of agents: runs, ATIF files or chats."""
    settings = merge("sft", overrides, data, checkpoint, name, draft_layers)
    run_config = load_config(config, settings)
    # Heavy: torch comes with it.
    from etude.controller.sft import check_sft, fine_tune

    train = partial(fine_tune, make_shelf=make_shelf)
    train_stage("sft", check_sft, train, run_config, config, settings, resume, as_json)
