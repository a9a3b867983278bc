"""`etude sft`."""

from __future__ import annotations

import typer

from etude.cli.exits import EXIT_INTERRUPTED
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
    print_interrupted,
    print_report,
)
from etude.cli.progress import open_observer
from etude.cli.served_model import make_shelf
from etude.cli.train import resumed_run
from etude.config import load_config
from etude.observe import RunDirectory


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

    if resume:
        run = resumed_run(run_config)
    else:
        check_sft(run_config)
        run = RunDirectory.create(run_config)
    try:
        report = fine_tune(run_config, run, open_observer(), resume, make_shelf)
    except KeyboardInterrupt:
        print_interrupted("sft", run, config, settings)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_report(run, report, as_json)
