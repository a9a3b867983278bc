"""`etude sft`."""

from __future__ import annotations

from etude.cli.pretrain import (
    Asked,
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
from etude.cli.train import DropOption, config_to_run


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
    from etude.controller.starting import settle_run_servers

    if not resume:
        run_config = settle_run_servers(run_config)
    asked = Asked(run_config, config, settings, resume, drop or [], as_json)
    train_stage("sft", check_sft, fine_tune, asked)
