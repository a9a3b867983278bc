"""`etude trajectory`: list, show, compare, replay and fork stored sessions."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import etude
from etude.cli.exits import error_console
from etude.cli.output import (
    JsonOption,
    output_console,
    print_diff,
    print_json,
    print_table,
    program,
    shown,
)
from etude.cli.trajectory_finding import ID_HELP, find, open_source
from etude.cli.trajectory_printing import (
    SessionPrinter,
    comparison_document,
    print_comparison,
    session_document,
    turn_document,
)
from etude.errors import ConfigError

if TYPE_CHECKING:
    # Heavy at run time: the parts of a run come with it.
    from etude.controller.agent.models import ModelChoice
    from etude.controller.stored import Stored
    from etude.environment.replay import Replay

trajectory_app = typer.Typer(
    name="trajectory", help="Show, compare, replay and fork stored sessions.", no_args_is_help=True
)

RunArgument = Annotated[Path, typer.Argument(help="Run directory.")]
WordsArgument = Annotated[list[str], typer.Argument(metavar="[RUN] ID", help=ID_HELP)]
TaskOption = Annotated[
    Path | None, typer.Option("--task", help="Harbor directory of the task, if the run cannot generate it.")
]
BackendOption = Annotated[str | None, typer.Option(help="Sandbox backend. Default: that of the run.")]
EXIT_DIFFERENT = 1


@trajectory_app.command("list")
def list_command(
    run: RunArgument,
    limit: Annotated[int, typer.Option(min=1, help="Number of sessions to list, from the first.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List the stored sessions in the order in which they were collected."""
    summaries = open_source(run).open().summaries()
    rows = list(islice(summaries, limit))
    if num_more := sum(1 for _ in summaries):
        total = len(rows) + num_more
        error_console().print(f"the first {len(rows)} of {total} sessions; --limit {total} lists all")
    if as_json:
        print_json([{**_identity(row.id), "status": row.status, "reward": row.reward} for row in rows])
        return
    lines: list[tuple[object, ...]] = []
    for row in rows:
        reward = None if row.reward is None else f"{row.reward:.2f}"
        lines.append((row.id, row.status, reward, row.oldest_step, row.num_turns, row.num_sampled_tokens))
    headings = ("id", "status", "reward", "version", "turns", "sampled tokens")
    print_table(output_console(), headings, lines, range(2, 6))


@trajectory_app.command("show")
def show_command(
    words: WordsArgument,
    turn: Annotated[int | None, typer.Option(help="Show only this turn, counted from 1.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show tokens and log-probabilities.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, tokens included.")] = False,
    as_atif: Annotated[bool, typer.Option("--atif", help="Print ATIF JSON.")] = False,
) -> None:
    """Show one session turn by turn, with its contexts and summaries."""
    (found,) = find(words, 1)
    trajectory = found.trajectory
    if turn is not None and not 1 <= turn <= len(trajectory.turns):
        raise ConfigError(
            "there is no such turn",
            field="--turn",
            received=turn,
            fix=f"give a number from 1 to {len(trajectory.turns)}",
        )
    from etude.store import trajectory_to_atif

    if as_atif:
        tokenizer = found.tokenizer
        decode = None if tokenizer is None else tokenizer.decode
        print_json(trajectory_to_atif(trajectory, agent_version=etude.__version__, decode=decode))
    elif as_json and turn is not None:
        print_json(turn_document(trajectory, turn))
    elif as_json:
        print_json(session_document(trajectory))
    else:
        printer = SessionPrinter(output_console(), trajectory, found.tokenizer)
        printer.header()
        printer.session(turn, tokens)


@trajectory_app.command("diff")
def diff_command(
    words: Annotated[list[str], typer.Argument(metavar="[RUN]... A B", help=ID_HELP)],
    as_json: JsonOption = False,
) -> None:
    """Show the first turn in which two sessions differ.

    The exit code is 1 if they differ.
    """
    from etude.store.comparison import compare

    left, right = find(words, 2)
    compared = compare(left.trajectory, right.trajectory)
    if as_json:
        print_json(comparison_document(left.trajectory, right.trajectory, compared))
    else:
        sides = (left.trajectory, right.trajectory)
        print_comparison(output_console(), sides, compared, (left.tokenizer, right.tokenizer))
    if not compared.equal:
        raise typer.Exit(EXIT_DIFFERENT)


@trajectory_app.command("replay")
def replay_command(
    words: WordsArgument,
    turn: Annotated[int | None, typer.Option(help="Last turn to replay. Default: all turns.")] = None,
    task: TaskOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the tool calls of a session again in a fresh sandbox, and compare the results.

    The exit code is 1 if any result differs.
    """
    (stored,) = find(words, 1)
    # Heavy: torch comes with it.
    from etude.controller.replaying import find_task, replay_stored

    replay = asyncio.run(replay_stored(stored, find_task(stored, task), backend, turn))
    if as_json:
        print_json({"id": str(stored.trajectory.id), **replay_document(replay)})
    else:
        console = output_console()
        console.print(Text(str(stored.trajectory.id), style="bold"))
        print_replay(console, replay)
    if not replay.equal:
        raise typer.Exit(EXIT_DIFFERENT)


@trajectory_app.command("fork")
def fork_command(
    words: WordsArgument,
    turn: Annotated[int, typer.Option(help="Last turn that is kept; 0 keeps none.")],
    run: Annotated[str, typer.Option("--run", help="Run that provides the model. Default: its own.")] = "",
    into: Annotated[
        Path | None,
        typer.Option(help="Write the workspace here for `etude agent --resume` instead of sampling."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="ATIF file for the new session.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling noise.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Temperature. Default: the session's.")] = None,
    task: TaskOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sample a new ending of a session from one of its turns. The tokens before that turn are kept."""
    (stored,) = find(words, 1)
    # Heavy: torch comes with it.
    from etude.controller.forking import Fork, create_session, sample_fork
    from etude.controller.replaying import find_task

    choice = _choice(stored, run, temperature)
    fork = Fork(turn, choice, find_task(stored, task), backend, seed, temperature)
    if into is not None:
        handed = asyncio.run(create_session(stored, fork, into))
        if as_json:
            replay = replay_document(handed.replay)
            print_json({"session": handed.session, "directory": str(handed.directory), "replay": replay})
            return
        print_replay(error_console(), handed.replay)
        output_console().print(Text(f"{program()} agent --resume {handed.session}"), soft_wrap=True)
        return
    trajectory, replay = asyncio.run(sample_fork(stored, fork))
    from etude.kit.durable import write_json
    from etude.store import trajectory_to_atif

    if output is not None:
        write_json(output, trajectory_to_atif(trajectory, agent_version=etude.__version__))
    if as_json:
        print_json({"trajectory": session_document(trajectory), "replay": replay_document(replay)})
        return
    print_replay(error_console(), replay)
    printer = SessionPrinter(output_console(), trajectory, stored.tokenizer)
    printer.header()
    printer.session(None, False)


def _choice(stored: Stored, run: str, temperature: float | None) -> ModelChoice:
    from etude.controller.agent.models import ModelChoice

    own = "" if stored.run is None else str(stored.run.path)
    if not (run or own):
        raise ConfigError(
            "this trajectory belongs to no run, so there is no model to continue it",
            field="--run",
            fix="name a run that uses the same tokenizer",
        )
    return ModelChoice(run=run or own, temperature=temperature)


def print_replay(console: Console, replay: Replay) -> None:
    """Prints how much was replayed, and which results differ."""
    from etude.environment.history import causes_of
    from etude.environment.replay import unified_diff

    for difference in replay.differences:
        title = f"turn {difference.turn + 1}, call {difference.position + 1}: {difference.call.name}"
        only = " and ".join(causes_of(difference))
        why = f": only {only}" if only else ""
        console.print(shown(f"{title} gave another result{why}", "bold cyan"))
        print_diff(console, unified_diff(difference))
    for entry in replay.from_record:
        what = f"turn {entry.turn + 1}, call {entry.position + 1}: {entry.call.name or 'malformed'}"
        console.print(shown(f"{what} was not replayed: it {entry.reason}", "yellow"))
    for note in replay.notes:
        console.print(shown(note, "yellow"))
    turns = f"{replay.num_turns} turn{'' if replay.num_turns == 1 else 's'}"
    calls = f"{replay.num_calls} call{'' if replay.num_calls == 1 else 's'}"
    differences = len(replay.differences)
    found = "no difference" if not differences else f"{differences} gave another result"
    found += f" ({len(replay.slower)} reported other durations)" if replay.slower else ""
    console.print(Text(f"{turns}, {calls} replayed in {replay.duration_s:.2f} s: {found}"))


def replay_document(replay: Replay) -> dict[str, Any]:
    """A replay as plain JSON values; turns and calls count from 1."""
    from etude.environment.history import causes_of
    from etude.environment.replay import unified_diff

    return {
        "equal": replay.equal,
        "turns": replay.num_turns,
        "calls": replay.num_calls,
        "duration_s": replay.duration_s,
        "differences": [
            {
                **asdict(difference),
                "turn": difference.turn + 1,
                "position": difference.position + 1,
                "only": list(causes_of(difference)),
                "diff": unified_diff(difference),
            }
            for difference in replay.differences
        ],
        "other_durations": [
            {"turn": c.turn + 1, "position": c.position + 1, "tool": c.call.name} for c in replay.slower
        ],
        "not_replayed": [
            {"turn": c.turn + 1, "position": c.position + 1, "tool": c.call.name, "reason": c.reason}
            for c in replay.from_record
        ],
        "notes": replay.notes,
    }


def _identity(identity: Any) -> dict[str, Any]:
    return {"id": str(identity), "task": identity.task, "group": identity.group, "index": identity.index}
