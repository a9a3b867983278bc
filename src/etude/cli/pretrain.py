"""`etude pretrain` and `etude sft`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli.config import SetOption
from etude.cli.output import output_console, print_json, print_table
from etude.cli.progress import open_observer
from etude.cli.train import DropOption, config_to_run, open_run, with_short_forms
from etude.errors import ConfigError
from etude.observe import RunDirectory

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration file (TOML). See docs/config.md.")
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="NAME=PATH",
        help="Training data. Short for --set SECTION.sources.NAME.path=PATH. Repeatable.",
    ),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="DIR", help="Initial model. Short for --set initial_checkpoint=DIRECTORY."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(help="Name of the run. Short for --set name=NAME. Default: the file's, or the command's."),
]
DraftLayersOption = Annotated[
    int | None,
    typer.Option("--draft-layers", help="Draft layers. Short for --set SECTION.drafts.num_layers=N."),
]
RanksOption = Annotated[
    int | None, typer.Option(help="Training processes. Short for --set parallel.ranks=N.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def _stage_command(section: str, words: str) -> Callable[..., None]:
    """Makes the command of a stage of next-token training, configured by `section`."""

    def command(
        config: ConfigOption = None,
        data: DataOption = None,
        checkpoint: CheckpointOption = None,
        overrides: SetOption = None,
        name: NameOption = None,
        draft_layers: DraftLayersOption = None,
        ranks: RanksOption = None,
        resume: ResumeOption = False,
        drop: DropOption = None,
        as_json: JsonOption = False,
    ) -> None:
        settings = merge(section, overrides, data, checkpoint, name, draft_layers, ranks)
        wanted = config_to_run(config, settings, resume, drop or [])
        if "name" not in wanted.model_fields_set:
            wanted = wanted.model_copy(update={"name": section})
        # Heavy: torch comes with them.
        from etude.controller.ranks import follow_torchrun

        if section == "pretrain":
            from etude.controller.pretraining import check_pretraining as check
            from etude.controller.pretraining import pretrain as train
        else:
            from etude.controller.sft import check_sft as check
            from etude.controller.sft import fine_tune as train

        if follow_torchrun(wanted):  # torchrun started this process to follow the first one
            return
        with open_run(section, wanted, config, settings, resume, drop or [], check) as (run, settled):
            report = train(settled, run, open_observer(), resume)
        _print_report(run, report, as_json)

    command.__doc__ = words
    return command


pretrain_command = _stage_command(
    "pretrain",
    "Train a model on text corpora: JSONL, Parquet, Lance or directories of files.",
)
sft_command = _stage_command(
    "sft",
    "Fine-tune a model on recorded agent sessions: runs, ATIF files or chats.",
)


def merge(
    section: str,
    overrides: Sequence[str] | None,
    data: Sequence[str] | None,
    checkpoint: Path | None,
    name: str | None,
    draft_layers: int | None,
    ranks: int | None = None,
) -> list[str]:
    """The overrides with the short forms appended, which take precedence. Raises ConfigError for a source
    without a name."""
    settings = list(overrides or [])
    for item in data or []:
        source, equals, path = item.partition("=")
        if not equals or not re.fullmatch("[A-Za-z0-9_-]+", source) or not path:
            raise ConfigError(
                "is not a name and a path" if equals else "has no name",
                field="--data",
                received=item,
                fix="write --data NAME=PATH, with a name of letters, digits, - and _",
            )
        settings.append(f"{section}.sources.{source}.path={json.dumps(path)}")
    numbers = {f"{section}.drafts.num_layers": draft_layers, "parallel.ranks": ranks}
    return with_short_forms(settings, numbers, {"initial_checkpoint": checkpoint, "name": name})


def _print_report(run: RunDirectory, report: Mapping[str, Any], as_json: bool) -> None:
    """Prints the results: held-out losses and counts by source, and the path of the model."""
    if as_json:
        print_json(report)
        return
    console = output_console()
    rows: list[tuple[str, ...]] = []
    measured = {"held-out loss": report["heldout_before"], "after": report["heldout_after"]}
    measured = {column: by_source for column, by_source in measured.items() if any(by_source.values())}
    for name, account in report["sources"].items():
        of_source = (losses.get(name, {}).get("loss") for losses in measured.values())
        losses = (f"{value:.3f}" if value is not None else "-" for value in of_source)
        counts = (account["tokens"], account["documents"], account["epochs"])
        rows.append((name, *losses, *(f"{count:,}" for count in counts)))
    columns = ("source", *measured, "tokens trained", "documents", "epochs")
    print_table(console, columns, rows, range(1, len(columns)), f"{report['steps']} steps")
    for name, depths in report.get("acceptance", {}).items():
        shares = ", ".join(f"{depth['greedy']:.0%}" for depth in depths)
        console.print(f"agreement of drafts, {name}: {shares}", markup=False)
    console.print(f"model   {run.checkpoints / 'final'}", markup=False, soft_wrap=True)
    console.print(f"report  {run.report_file}", markup=False, soft_wrap=True)
