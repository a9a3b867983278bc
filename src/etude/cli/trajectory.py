"""`etude trajectory`: list, show and compare stored sessions; `replay` and `fork` are beside this."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import etude
from etude.cli.output import output_console, print_json
from etude.cli.trajectory_finding import find, open_source
from etude.cli.trajectory_printing import (
    SessionPrinter,
    comparison_document,
    print_comparison,
    turn_document,
)
from etude.cli.trajectory_replaying import fork_command, replay_command
from etude.errors import ConfigError

trajectory_app = typer.Typer(name="trajectory", help="Read stored trajectories.", no_args_is_help=True)

RunArgument = Annotated[Path, typer.Argument(help="Run directory.")]
ONE = "An id, or a part of one that only one has; or an ATIF file. A run before it; else those in runs/."
EXIT_DIFFERENT = 1


@trajectory_app.command("list")
def list_command(
    run: RunArgument,
    limit: Annotated[int, typer.Option(min=1, help="How many, from the first.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the stored trajectories in the order in which they were collected."""
    rows = list(islice(open_source(run).open().summaries(), limit))
    if as_json:
        print_json([{**_identity(row.id), "status": row.status, "reward": row.reward} for row in rows])
        return
    table = Table(box=None, pad_edge=False)
    for name in ("id", "status", "reward", "version", "turns", "sampled tokens"):
        table.add_column(name, justify="left" if name in ("id", "status") else "right", overflow="fold")
    for row in rows:
        reward = "" if row.reward is None else f"{row.reward:.2f}"
        step = "" if row.oldest_step is None else str(row.oldest_step)
        figures = (reward, step, str(row.num_turns), str(row.num_sampled_tokens))
        table.add_row(Text(str(row.id)), row.status, *figures)
    output_console().print(table)


@trajectory_app.command("show")
def show_command(
    words: Annotated[list[str], typer.Argument(metavar="[RUN] ID", help=ONE)],
    turn: Annotated[int | None, typer.Option(help="This turn only, from 1.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every token with its logprob.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, tokens included.")] = False,
    as_atif: Annotated[bool, typer.Option("--atif", help="Print as ATIF JSON.")] = False,
) -> None:
    """Show one session turn by turn, its contexts and summaries."""
    (found,) = find(words, 1)
    trajectory = found.trajectory
    if turn is not None and not 1 <= turn <= len(trajectory.turns):
        raise ConfigError(
            "there is no such turn",
            field="--turn",
            received=turn,
            fix=f"a number from 1 to {len(trajectory.turns)}",
        )
    from etude.store import trajectory_to_atif
    from etude.store.documents import trajectory_document

    if as_atif:
        tokenizer = found.tokenizer
        decode = None if tokenizer is None else tokenizer.decode
        print_json(trajectory_to_atif(trajectory, agent_version=etude.__version__, decode=decode))
    elif as_json and turn is not None:
        print_json(turn_document(trajectory, turn))
    elif as_json:
        arrays = [_arrays(segment) for segment in trajectory.segments]
        print_json({**trajectory_document(trajectory), "id": str(trajectory.id), "arrays": arrays})
    else:
        printer = SessionPrinter(output_console(), trajectory, found.tokenizer)
        printer.header()
        printer.session(turn, tokens)


@trajectory_app.command("diff")
def diff_command(
    words: Annotated[list[str], typer.Argument(metavar="[RUN]... A B", help=ONE)],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show where two sessions part: the first turn that differs. Exit code 1 if anything does."""
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


def _arrays(segment: Any) -> dict[str, Any]:
    return {name: getattr(segment, name).tolist() for name in ("tokens", "sampled", "logprobs")}
