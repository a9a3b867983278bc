"""`etude trajectory`: list, show and compare stored sessions; see also `trajectory_replaying`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

import etude
from etude.cli.exits import error_console
from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.cli.trajectory_finding import ID_HELP, find, open_source
from etude.cli.trajectory_printing import (
    SessionPrinter,
    comparison_document,
    print_comparison,
    session_document,
    turn_document,
)
from etude.cli.trajectory_replaying import fork_command, replay_command
from etude.errors import ConfigError

trajectory_app = typer.Typer(
    name="trajectory", help="Show, compare, replay and fork stored sessions.", no_args_is_help=True
)

RunArgument = Annotated[Path, typer.Argument(help="Run directory.")]
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
    words: Annotated[list[str], typer.Argument(metavar="[RUN] ID", help=ID_HELP)],
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


trajectory_app.command("replay")(replay_command)
trajectory_app.command("fork")(fork_command)


def _identity(identity: Any) -> dict[str, Any]:
    return {"id": str(identity), "task": identity.task, "group": identity.group, "index": identity.index}
