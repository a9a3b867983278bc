"""`etude sft`."""

from __future__ import annotations

from etude.cli.pretrain import (
    CheckpointOption,
    ConfigOption,
    DataOption,
    DraftLayersOption,
    JsonOption,
    NameOption,
    OverridesOption,
    RanksOption,
    ResumeOption,
    merge,
    train_stage,
)
from etude.cli.train import Asked, DropOption, config_to_run


def sft_command(
    config: ConfigOption = None,
    data: DataOption = None,
    checkpoint: CheckpointOption = None,
    overrides: OverridesOption = None,
    name: NameOption = None,
    draft_layers: DraftLayersOption = None,
    ranks: RanksOption = None,
    resume: ResumeOption = False,
    drop: DropOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model on recorded agent sessions: runs, ATIF files or chats."""
    settings = merge("sft", overrides, data, checkpoint, name, draft_layers, ranks)
    run_config = config_to_run(config, settings, resume, drop or [])
    # Heavy: torch comes with it.
    from etude.controller.sft import check_sft, fine_tune

    asked = Asked("sft", run_config, config, settings, resume, drop or [])
    train_stage(asked, check_sft, fine_tune, as_json)
