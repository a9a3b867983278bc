"""`etude train`."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli.config import SetOption
from etude.cli.exits import EXIT_INTERRUPTED, error_console
from etude.cli.output import (
    output_console,
    print_comparisons,
    print_examples,
    print_json,
    print_suggestions,
    program,
)
from etude.cli.progress import open_observer
from etude.config import RunConfig, load_config
from etude.errors import ConfigError, RunDirectoryError, UnknownKeyError
from etude.observe import RunDirectory

MAY_CHANGE_ON_RESUME = frozenset(
    {"runs_directory", "max_wall_s", "engine.kernels", "executor"}
    | {f"sandbox.{key}" for key in ("server", "token", "servers_file", "patience_s")}
    | {"weights.url", "weights.read_url"}
    | {f"parallel.{key}" for key in ("ranks", "fsdp", "expert", "context", "tensor", "timeout_s")}
)
MAY_CHANGE_WITHIN = ("cluster.", "clusters.", "elastic.", "plan.", "sandbox.servers.")
"""Sections of which all keys may change on resume."""

DropOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drop",
        metavar="KEY",
        help="With --resume: ignore a key that this version no longer has. Repeatable.",
    ),
]


def train_command(
    config: Annotated[
        Path, typer.Option("--config", help="Configuration file, such as configs/quickstart.toml.")
    ],
    overrides: SetOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run. Short for --set seed=N.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run. Short for --set name=NAME.")] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            "--from-log",
            metavar="RUN",
            help="Train on stored sessions. Short for --set rl.stream.source=RUN.",
        ),
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Foreign agent to train: a command run in each task's sandbox. Short for --set "
            "agent.harness.command=COMMAND.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Training processes. Short for --set parallel.ranks=N.")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(help="Executor: local (one process) or ray. Short for --set executor=NAME."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    drop: DropOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train an agent: mid-training, reinforcement learning, and an evaluation before and after."""
    numbers = {"seed": seed, "parallel.ranks": ranks}
    texts = {"name": name, "executor": executor, "agent.harness.command": harness}
    if harness == "":
        raise ConfigError("needs a command", field="--harness", received=harness, fix="give one")
    settings = with_short_forms(overrides or [], numbers, {**texts, "rl.stream.source": from_log})
    run_config = config_to_run(config, settings, resume, drop or [])
    # Heavy: torch comes with it.
    from etude.controller.ranks import follow_torchrun
    from etude.controller.starting import check_start
    from etude.observe.report import build_report

    if follow_torchrun(run_config):
        return
    recorded = bool(run_config.rl.stream.source)
    if recorded:
        from etude.controller.recorded import resolve_recorded
        from etude.controller.recorded import train_recorded as train

        run_config = resolve_recorded(run_config)
    else:
        from etude.controller.train import train

    check = partial(check_start, observer=open_observer())
    with open_run("train", run_config, config, settings, resume, drop or [], check) as (run, run_config):
        report = train(run_config, run, open_observer(), resume)
        build_report(run)
    if as_json:
        print_json(report)
    elif recorded:
        print_recorded(run, report)
    else:
        print_result(run, report)


@contextlib.contextmanager
def open_run(
    command: str,
    config: RunConfig,
    file: Path | None,
    settings: Sequence[str],
    resume: bool,
    dropped: Sequence[str],
    check: Callable[[RunConfig], None],
) -> Iterator[tuple[RunDirectory, RunConfig]]:
    """Creates or resumes the run; yields it and its settled configuration, for training within the block.

    `config`: from `file` and `settings`. A new run that is refused leaves no directory. After Ctrl-C, prints
    how to resume, and raises typer.Exit.
    """
    from etude.controller.starting import resolve_run_servers  # heavy, as its callers' imports

    if resume:
        run, config = resumed_run(config, dropped)
    else:
        config = resolve_run_servers(config)
        check(config)
        run = RunDirectory.create(config)
    try:
        with contextlib.nullcontext() if resume else run.removed_if_refused():
            yield run, config
    except KeyboardInterrupt:
        options = [part for setting in settings for part in ("--set", setting)]
        named = [] if file is None else ["--config", str(file)]
        again = shlex.join([program(), command, *named, *options, "--resume"])
        error_console().print(f"interrupted; state saved in {run.path}; resume with:", markup=False)
        error_console().print(f"  {again}", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def print_result(run: RunDirectory, report: dict[str, Any]) -> None:
    """Prints the results of a run."""
    from etude.observe.report import behaviour_comparisons, headline, next_steps, results_comparisons

    console = output_console()
    console.print()
    console.print(headline(report), style="bold", markup=False)
    console.print()
    print_comparisons(console, "solved", results_comparisons(report))
    print_comparisons(console, "how the agent works", behaviour_comparisons(report))
    print_examples(console, run.read_json(run.examples_file) or [])
    console.print(f"report  {run.html_file}", markup=False, soft_wrap=True)
    console.print(f"plots   {run.plots}", markup=False, soft_wrap=True)
    console.print()
    print_suggestions(console, next_steps(report, str(run.path), program()))


def print_recorded(run: RunDirectory, report: dict[str, Any]) -> None:
    """Prints the results of a run on recorded trajectories."""
    console = output_console()
    passed = ", ".join(f"{count} {reason}" for reason, count in sorted(report["passed_groups"].items()))
    console.print(
        f"{report['rl_steps']} steps on {report['trained_groups']} groups of {report['source']}; "
        f"skipped: {passed or 'none'}",
        style="bold",
        markup=False,
    )
    console.print(f"model   {run.checkpoints / 'final'}", markup=False, soft_wrap=True)
    console.print(f"report  {run.html_file}", markup=False, soft_wrap=True)


def with_short_forms(
    overrides: Sequence[str], numbers: Mapping[str, int | None], texts: Mapping[str, str | Path | None]
) -> list[str]:
    """The overrides with the short forms appended, which take precedence."""
    short = [f"{key}={number}" for key, number in numbers.items() if number is not None]
    short += [f"{key}={json.dumps(str(text))}" for key, text in texts.items() if text is not None]
    return [*overrides, *short]


def config_to_run(file: Path | None, settings: list[str], resume: bool, dropped: Sequence[str]) -> RunConfig:
    """The configuration of a command. `dropped`: the keys of `--drop`. Raises ConfigError."""
    if dropped and not resume:
        raise ConfigError(
            "is only valid with --resume",
            field="--drop",
            received=dropped,
            fix="remove the key from the file",
        )
    try:
        return load_config(file, settings, dropped)
    except UnknownKeyError as error:
        if resume:
            raise _unknown_key_error(error, "this version does not know the key") from error
        raise


def _unknown_key_error(error: UnknownKeyError, message: str) -> UnknownKeyError:
    """The error for a key that only an older version knew."""
    return UnknownKeyError(
        message,
        field=error.field,
        received=error.received,
        fix=f"add --drop {error.field} to continue without it, or resume with the version that started the "
        "run (environment.json names it)",
    )


def resumed_run(config: RunConfig, dropped: Sequence[str] = ()) -> tuple[RunDirectory, RunConfig]:
    """The run to resume, without the keys of `--drop`, and the configuration with the stored descriptions of
    its MCP servers. Raises RunDirectoryError if it was started with another configuration, ConfigError for a
    key that this version does not know."""
    path = Path(config.runs_directory) / config.name
    if not path.exists():
        raise RunDirectoryError(
            "there is no run to resume", field="--resume", received=str(path), fix="start it without --resume"
        )
    run = RunDirectory.open(path)
    try:
        run.drop_keys(dropped)
        begun_with = run.config
    except UnknownKeyError as error:
        raise _unknown_key_error(
            error, "the run was started with a key that this version does not know"
        ) from error
    config = _with_described_tools(config, begun_with)
    stored, wanted = (_flatten(either.model_dump(mode="json")) for either in (begun_with, config))
    asked = run.environment.get("asked", {})  # where a time limit has become other steps
    for key in dict.fromkeys((*wanted, *stored)):
        value = wanted.get(key)
        may_change = key in MAY_CHANGE_ON_RESUME or key.startswith(MAY_CHANGE_WITHIN)
        if not may_change and value not in (stored.get(key), asked.get(key, stored.get(key))):
            raise RunDirectoryError(
                f"the run was started with {stored[key]!r}"
                if key in stored
                else "the run was started without",
                field=key,
                received=value,
                fix=f"resume with the same value, or start another with --name NAME (see {run.config_file})",
            )
    return run, config


def _with_described_tools(config: RunConfig, stored: RunConfig) -> RunConfig:
    """`config` with the stored run's descriptions of its MCP servers, which are not queried again."""
    mcp = dict(config.agent.mcp)
    for name in mcp.keys() & stored.agent.mcp.keys():
        described = mcp[name].described or stored.agent.mcp[name].described
        mcp[name] = mcp[name].model_copy(update={"described": described})
    return config.model_copy(update={"agent": config.agent.model_copy(update={"mcp": mcp})})


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
