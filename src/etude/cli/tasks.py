"""`etude tasks show`, `export`, `sessions`, `check`, `calibrate`, `make` and `import`."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator, Sized
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from etude.cli.exits import error_console
from etude.cli.output import output_console, print_diff, print_json, print_table
from etude.cli.progress import count_steps, open_observer
from etude.errors import ConfigError, TaskError
from etude.records import Task

if TYPE_CHECKING:
    from etude.environment.making.reports import MakeReport

tasks_app = typer.Typer(name="tasks", help="Show, export, check and make tasks.", no_args_is_help=True)


SplitOption = Annotated[
    str, typer.Option(help="`train`, or an evaluation split of the task family, such as heldout.")
]
TrainSeedOption = Annotated[
    int | None, typer.Option(min=0, help="Seed of the split `train`. Other splits have no seed.")
]
ConfigOption = Annotated[Path | None, typer.Option(help="TOML file with the settings of a run.")]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value. Repeatable.")
]


@tasks_app.command("show")
def show_command(
    index: Annotated[
        int, typer.Argument(min=0, help="Task index; splits other than `train` are generated up to it.")
    ],
    split: SplitOption = "train",
    seed: TrainSeedOption = None,
    solution: Annotated[bool, typer.Option("--solution", help="Also show the reference solution.")] = False,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Show one task of the configured family: the instruction and the files."""
    task = next(_read_tasks(split, range(index, index + 1), seed, config, settings), None)
    if task is None:
        raise TaskError("the split has fewer tasks", field="INDEX", received=index, fix="give a smaller one")
    console = output_console()
    console.print(Text(f"{task.id}: {task.instruction}", style="bold"))
    console.print(Text("  ".join(f"{key} {value}" for key, value in task.metadata.items()), style="dim"))
    for path, text in task.files.items():
        console.print()
        console.print(Text(path, style="bold cyan"))
        console.print(Text(text.rstrip("\n")), soft_wrap=True)
    if solution:
        _print_solution(console, task)


@tasks_app.command("export")
def export_command(
    directory: Annotated[Path, typer.Argument(help="Directory to write to, with one directory per task.")],
    split: SplitOption = "heldout",
    count: Annotated[int, typer.Option("--tasks", "--count", min=1, help="Number of tasks.")] = 10,
    seed: TrainSeedOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Write tasks of the configured family as Harbor task directories."""
    from etude.tasks.harbor import write_harbor

    if directory.exists() and any(directory.iterdir()):
        raise TaskError(
            "is not empty", field="DIR", received=str(directory), fix="name a new or empty directory"
        )
    written: list[Path] = []
    for task in _read_tasks(split, range(count), seed, config, settings):
        written.append(directory / task.id)
        write_harbor(task, written[-1])
        typer.echo(written[-1])
    error_console().print(f"tasks: {len(written)}")


@tasks_app.command("sessions")
def sessions_command(
    file: Annotated[Path, typer.Argument(help="JSONL file of chats to write.")],
    count: Annotated[int, typer.Option(min=1, help="Number of sessions to read.")] = 1000,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    flawless: Annotated[
        bool, typer.Option("--flawless", help="Only sessions whose tests pass the first time they run.")
    ] = False,
) -> None:
    """Write sessions of a scripted author as chats, for `etude sft` to fine-tune a published model on.

    The author comes from the configured family; for tasks in a directory it follows the reference solutions
    of the training tasks. The section `agent` determines the tools and the system message. Sessions that
    call other tools, or show malformed calls, are left out.
    """
    from etude.config import load_config
    from etude.controller.expert_chats import write_chats
    from etude.controller.families import open_family
    from etude.controller.starting import resolve_run_servers
    from etude.kit.durable import make_directory

    run_config = resolve_run_servers(load_config(config, settings or []))
    # To report an unwritable file now, and not after the sessions have been generated.
    if file.is_dir():
        raise ConfigError("is a directory", field="FILE", received=str(file), fix="name a file")
    make_directory(file.parent)
    tempfile.TemporaryFile(dir=file.parent).close()
    sessions = open_family(run_config, open_observer()).sessions(count, open_observer())
    written = write_chats(sessions, file, run_config.agent, flawless=flawless)
    others = "call tools that agent.tools lacks, show malformed calls" + ", fail a test run" * flawless
    left_out = f"; the others {others}" if written < len(sessions) else ""
    error_console().print(f"{written} of {len(sessions)} sessions{left_out}")


@tasks_app.command("check")
def check_command(
    directory: Annotated[Path, typer.Argument(help="Directory with one Harbor task directory per task.")],
    backend: Annotated[str | None, typer.Option(help="Sandboxes in which the tasks are tried.")] = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every task's report as JSON.")] = False,
) -> None:
    """Check each task: its reference solution must earn 1, and doing nothing 0, each time it is tried.

    Lists the tasks that fail, with the reason, and those whose verdict an agent could forge. Exits with 1 if
    any fails.
    """
    from etude.config import load_config
    from etude.controller.task_sets import check_task_set

    chosen = [f"sandbox.backend={backend}"] if backend is not None else []
    run_config = load_config(config, [*(settings or []), *chosen])
    checked = check_task_set(directory, "DIR", run_config, open_observer())
    if as_json:
        print_json([task.to_document() for task in checked])
    else:
        for task in checked:
            if task.report.reason is not None:
                typer.echo(f"{task.name}: fails: {task.report.reason}")
            for words in task.report.forgeable:
                typer.echo(f"{task.name}: forgeable: {words}")
    num_failed = sum(task.report.reason is not None for task in checked)
    num_forgeable = sum(bool(task.report.forgeable) for task in checked)
    words = f"{len(checked) - num_failed} of {len(checked)} tasks are verified, {num_forgeable} are forgeable"
    error_console().print(words)
    if num_failed:
        raise typer.Exit(1)


@tasks_app.command("calibrate")
def calibrate_command(
    directory: Annotated[Path, typer.Argument(help="Directory with one Harbor task directory per task.")],
    evaluation: Annotated[
        Path, typer.Argument(help="What `etude eval TARGET --suite DIRECTORY --samples 8 --out DIR` wrote.")
    ],
) -> None:
    """Write into each task how many of a model's sessions solve it, and its difficulty.

    A task that no session solves keeps its difficulty, which depends on its tests; one that was not tried is
    not changed. Runs select tasks by difficulty with `tasks.only.difficulty`.
    """
    from etude.controller.task_sets import calibrate_task_set

    levels = calibrate_task_set(directory, evaluation)
    shown = ", ".join(f"{count} {level}" for level, count in sorted(levels.items()))
    error_console().print(f"{count_steps(levels.total(), 'task')}: {shown}", highlight=False)


@tasks_app.command("make")
def make_command(
    repo: Annotated[Path, typer.Argument(help="Checkout, or unpacked source distribution, of a project.")],
    out: Annotated[Path, typer.Option(help="Directory for the tasks; a started one is continued.")],
    releases: Annotated[
        list[Path] | None,
        typer.Option(
            "--release",
            help="Earlier release, a directory or an sdist, instead of git's history. Repeatable, "
            "oldest first.",
        ),
    ] = None,
    num_tasks: Annotated[int, typer.Option("--tasks", min=1, help="Number of tasks.")] = 200,
    runs: Annotated[int, typer.Option(min=2, help="Number of test runs, to find flaky tests.")] = 20,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes for testing changes.")] = 45.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the changes.")] = 0,
    image: Annotated[
        str | None, typer.Option(help="Image that has the project's packages. Default: one is built.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Sandboxes at the same time. Default: one for each core.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Sandboxes in which the tests run.")] = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make verified tasks from a Python project that has tests.

    Its tests run many times, so that flaky ones are not used. Then its code is changed: past commits or
    releases are undone, bugs planted, features deleted, working code made worse. A change that the tests
    detect (or ruff, in working code) becomes a task if its solution earns 1 and doing nothing 0. After an
    interruption the same command continues. Exits with 1 if no task was made.
    """
    from etude.config import load_config
    from etude.controller.task_making import make_task_set
    from etude.environment.making.pipeline import MakeSettings
    from etude.tasks.making.changes import Quotas

    chosen = [f"sandbox.backend={backend}"] if backend is not None else []
    run_config = load_config(config, [*(settings or []), *chosen])
    how = MakeSettings(
        Quotas(num_tasks),
        runs,
        seed,
        image=image,
        at_once=at_once or os.cpu_count() or 1,
        budget_s=60 * minutes,
    )
    report = make_task_set(repo, out, how, run_config, open_observer(), releases or [])
    if as_json:
        print_json(report.to_document())
    else:
        _print_report(report)
    error_console().print(
        f"{count_steps(len(report.written), 'task')} in {out}", soft_wrap=True, highlight=False
    )
    if not report.written:
        raise typer.Exit(1)


@tasks_app.command("import")
def import_command(
    rows: Annotated[Path, typer.Argument(help="JSONL or parquet file with a solved issue in each row.")],
    repositories: Annotated[Path, typer.Option(help="Directory with clones of the repositories.")],
    out: Annotated[Path, typer.Option(help="Directory of the tasks.")],
    image: Annotated[
        str | None, typer.Option(help="Image with what the tests need, for rows without docker_image.")
    ] = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Turn rows of solved issues, as SWE-bench has them, into Harbor task directories.

    No repository is fetched or run: `etude tasks check` then tries the tasks. A missing image that is one of
    Debian's bases (`etude sandbox image list`) is built from Debian's packages. Rows that cannot become tasks
    are listed in report.json with the reason. Exits with 1 if no task was made.
    """
    from etude.config import load_config
    from etude.controller.task_making import import_task_set

    report = import_task_set(rows, repositories, out, load_config(config, settings or []), image)
    if as_json:
        print_json(asdict(report))
    else:
        for reject in report.rejects:
            typer.echo(f"{reject['row']}: rejected: {reject['reason']}")
    made, rejected = count_steps(len(report.written), "task"), count_steps(len(report.rejects), "row")
    error_console().print(f"{made}, {rejected} rejected")
    if not report.written:
        raise typer.Exit(1)


def _print_report(report: MakeReport) -> None:
    """Prints counts for each stage, and the reasons of rejections."""
    rows = [
        (len(report.baseline.stable), "tests that can grade a task"),
        (report.num_twinned, "of these with variants for hidden exams"),
        (len(report.baseline.unstable), "tests that are flaky, fail or are skipped"),
        (report.num_tested, "changes tested"),
        (report.num_noticed, "changes that tests detect"),
        (report.num_checked, "tasks checked by the grader"),
        (len(report.written), "tasks made"),
        *((count, f"of these of the kind {kind}") for kind, count in report.kinds.most_common()),
        (report.num_open, "of these that could be partly forged: a failing test has no exam variant"),
        (report.num_naming_every_call, "of these whose instruction names every failing call"),
        *((count, f"rejected: {reason}") for reason, count in report.reasons.most_common()),
    ]
    print_table(output_console(), ("", ""), rows, right=(0,))
    for kind, why in report.left_out.items():
        output_console().print(f"no {kind}: {why}")
    if report.missed:
        output_console().print(report.missed)


def _read_tasks(
    split: str, numbers: range, seed: int | None, config: Path | None, settings: list[str] | None
) -> Iterator[Task]:
    """Tasks of the configured family; fewer if the split has no more. A finite set is read once."""
    from etude.config import load_config
    from etude.controller.families import check_split, open_family

    if seed is not None and split != "train":
        fix = "leave it out, or choose --split train"
        raise ConfigError("only the split train has a seed", field="--seed", received=seed, fix=fix)
    chosen = [f"seed={seed}"] if seed is not None else []
    family = open_family(load_config(config, [*(settings or []), *chosen]))
    check_split(split, ("train", *family.splits))
    if split == "train":
        source = family.source()
        sized: object = source
        stop = min(numbers.stop, len(sized)) if isinstance(sized, Sized) else numbers.stop
        return map(source, range(numbers.start, stop))
    return iter(family.evaluation_tasks(split, numbers.stop)[numbers.start :])


def _print_solution(console: Console, task: Task) -> None:
    for path, text in task.solution_files.items():
        before = task.files.get(path, "")
        diff = difflib.unified_diff(
            before.splitlines(), text.splitlines(), f"a/{path}", f"b/{path}", lineterm=""
        )
        console.print()
        print_diff(console, diff)
