"""`etude pretrain`."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli.exits import EXIT_INTERRUPTED, error_console
from etude.cli.output import output_console, print_json, print_table, program
from etude.cli.progress import open_observer
from etude.cli.train import DropOption, config_to_run, resumed_run
from etude.config import RunConfig
from etude.errors import ConfigError
from etude.observe import Observer, RunDirectory

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration file (TOML). See docs/config.md.")
]
OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value. Repeatable.")
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
NameOption = Annotated[str | None, typer.Option(help="Name of the run. Short for --set name=NAME.")]
DraftLayersOption = Annotated[
    int | None,
    typer.Option("--draft-layers", help="Draft layers. Short for --set SECTION.drafts.num_layers=N."),
]
RanksOption = Annotated[
    int | None, typer.Option(help="Training processes. Short for --set parallel.ranks=N.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def pretrain_command(
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
    """Train a model on text corpora: JSONL, Parquet, Lance or directories of files."""
    settings = merge("pretrain", overrides, data, checkpoint, name, draft_layers, ranks)
    run_config = config_to_run(config, settings, resume, drop or [])
    # Heavy: torch comes with it.
    from etude.controller.pretraining import check_pretraining, pretrain
    from etude.controller.starting import settle_run_servers

    if not resume:  # the tokenizer gets the tags of their tools
        run_config = settle_run_servers(run_config)
    asked = Asked(run_config, config, settings, resume, drop or [], as_json)
    train_stage("pretrain", check_pretraining, pretrain, asked)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command was asked for."""

    config: RunConfig
    file: Path | None
    settings: Sequence[str]
    resume: bool
    dropped: Sequence[str]
    as_json: bool


def train_stage(
    stage: str,
    check: Callable[[RunConfig], None],
    train: Callable[[RunConfig, RunDirectory, Observer, bool], dict[str, Any]],
    asked: Asked,
) -> None:
    """Begins a run of a stage, or goes on with it, and prints its report, or how to go on after Ctrl-C. In a
    process that torchrun started to follow the first one, follows it instead."""
    from etude.controller.ranks import follow_torchrun  # heavy, as its caller's imports

    config = asked.config
    if follow_torchrun(config):
        return
    if asked.resume:
        run, config = resumed_run(config, asked.dropped)
    else:
        check(config)
        run = RunDirectory.create(config)
    try:
        with contextlib.nullcontext() if asked.resume else run.forgotten_if_refused():
            report = train(config, run, open_observer(), asked.resume)
    except KeyboardInterrupt:
        _print_interrupted(stage, run, asked.file, asked.settings)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _print_report(run, report, asked.as_json)


def merge(
    section: str,
    overrides: Sequence[str] | None,
    data: Sequence[str] | None,
    checkpoint: Path | None,
    name: str | None,
    draft_layers: int | None,
    ranks: int | None = None,
) -> list[str]:
    """The overrides with the short forms appended, which so win. Raises ConfigError for a source without a
    name."""
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
    texts = {"initial_checkpoint": checkpoint, "name": name}
    settings += [f"{key}={json.dumps(str(text))}" for key, text in texts.items() if text is not None]
    numbers = {f"{section}.drafts.num_layers": draft_layers, "parallel.ranks": ranks}
    return settings + [f"{key}={number}" for key, number in numbers.items() if number is not None]


def _print_interrupted(command: str, run: RunDirectory, config: Path | None, settings: Sequence[str]) -> None:
    """How to go on, on standard error."""
    options = [part for setting in settings for part in ("--set", setting)]
    file = [] if config is None else ["--config", str(config)]
    again = shlex.join([program(), command, *file, *options, "--resume"])
    error_console().print(f"interrupted; state saved in {run.path}; resume with:", markup=False)
    error_console().print(f"  {again}", markup=False, soft_wrap=True)


def _print_report(run: RunDirectory, report: Mapping[str, Any], as_json: bool) -> None:
    """What came out: held-out losses by source, what was read, and where the model is."""
    if as_json:
        print_json(report)
        return
    console = output_console()
    rows: list[tuple[str, ...]] = []
    for name, account in report["sources"].items():
        before, after = (report[key].get(name, {}).get("loss") for key in ("heldout_before", "heldout_after"))
        losses = (f"{value:.3f}" if value is not None else "-" for value in (before, after))
        counts = (account["tokens"], account["documents"], account["epochs"])
        rows.append((name, *losses, *(f"{count:,}" for count in counts)))
    columns = ("source", "held-out loss", "after", "tokens trained", "documents", "epochs")
    print_table(console, columns, rows, range(1, 6), f"{report['steps']} steps")
    for name, depths in report.get("acceptance", {}).items():
        shares = ", ".join(f"{depth['greedy']:.0%}" for depth in depths)
        console.print(f"drafts that agree, {name}: {shares}", markup=False)
    console.print(f"model   {run.checkpoints / 'final'}", markup=False, soft_wrap=True)
    console.print(f"report  {run.report_file}", markup=False, soft_wrap=True)
