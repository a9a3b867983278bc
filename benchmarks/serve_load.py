"""Load-tests a server with OpenAI's API (`etude serve`, `etude route`, vLLM) with agent sessions.

    python benchmarks/serve_load.py http://127.0.0.1:8670 [--sessions 32] [--json]

The exit code is 1 if any turn was not answered completely.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load import (
    LoadReport,
    LoadSession,
    LogNormal,
    WorkloadShape,
    run_load,
    summarise,
    synthetic_sessions,
)
from benchmarks.load.http_target import HttpTarget
from benchmarks.load.recorded import recorded_sessions
from benchmarks.load.workload import shorten
from rich.text import Text

from etude.cli.exits import EXIT_INFRASTRUCTURE, EXIT_MISTAKE, error_console, print_error
from etude.cli.output import output_console, print_json, print_table
from etude.errors import ConfigError, EtudeError, InfrastructureError, UserError
from etude.kit.secrets import read_secret_file
from etude.serving.client import Client

EXIT_ERRORS = 1
_ANSWER_S = 30.0
_CONTEXT_SHARE = 0.85
"""Share of a model's context that the planned length of a session may fill."""


def build_parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s URL [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", help="address of the server: http://HOST:PORT")
    add("--model", help="model to request; default: the server's first one")
    add(
        "--api",
        choices=("chat", "completions", "tokens"),
        default="chat",
        help="API to call: with made-up words (default: chat), or with recorded token ids (tokens)",
    )
    add("--sessions", type=_number(int, 1), default=32, help="number of sessions (%(default)s)")
    for name, kind, default, words in (
        ("--turns", _lengths, "6", "turns per session: MEDIAN-P99 of a lognormal"),
        ("--prompt", _bounds, "200-800", "tokens of the first prompt: LOW-HIGH, uniform"),
        ("--observation", _bounds, "20-200", "tokens of each later input: LOW-HIGH, uniform"),
        ("--output", _lengths, "40-400", "tokens of each answer: MEDIAN-P99 of a lognormal"),
        ("--tools", _lengths, "0", "seconds between two turns: MEDIAN-P99 of a lognormal"),
    ):
        add(name, type=kind, default=default, help=f"{words} ({default})")
    add("--recorded", type=Path, help="replay the sessions of a run, a trajectory log or ATIF files")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=_number(int, 1), help="sessions at the same time; default: all")
    pace.add_argument("--rate", type=_number(float, 1e-6), help="mean arrivals of sessions per second")
    add("--turn-limit-s", type=_number(float, 0.1), default=600.0, help="limit of one turn (%(default)s)")
    add("--seed", type=_number(int, 0), default=0, help="seed of everything that is drawn at random")
    add("--key-file", type=Path, help="file that holds the server's bearer token")
    add("--extra", type=_fields, default="{}", help="JSON object of further fields for each request")
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """An argparse type for numbers of at least `least`."""

    def number(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return number


def _pair(text: str) -> tuple[float, float]:
    """Parses "A" or "A-B"."""
    low, _, high = text.partition("-")
    try:
        return float(low), float(high or low)
    except ValueError as error:
        raise argparse.ArgumentTypeError("must be A or A-B, such as 40-400") from error


def _bounds(text: str) -> tuple[int, int]:
    low, high = _pair(text)
    return round(low), round(high)


def _lengths(text: str) -> LogNormal:
    try:
        return LogNormal(*_pair(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return found


def plan_sessions(options: argparse.Namespace) -> list[LoadSession]:
    """The recorded or synthetic sessions that the options describe. Raises UserError."""
    if options.recorded is not None:
        return recorded_sessions(options.recorded, options.sessions)
    if options.api == "tokens":
        raise UserError("needs sessions that hold token ids", field="--api", fix="add --recorded")
    try:
        shape = WorkloadShape(
            num_sessions=options.sessions,
            turns=options.turns,
            prompt_tokens=options.prompt,
            output_tokens=options.output,
            observation_tokens=options.observation,
            tool_s=options.tools,
        )
    except ConfigError as error:
        option = f"--{(error.field or '').removesuffix('_tokens')}"
        raise UserError(error.message, field=option, received=error.received) from error
    return synthetic_sessions(shape, options.seed)


async def measure_server(options: argparse.Namespace, sessions: list[LoadSession]) -> LoadReport:
    """Plays the sessions, shortened to the model's context if necessary. Raises EtudeError, TimeoutError."""
    key = read_secret_file(options.key_file, "--key-file")
    model, context = await find_model(options.url, key, options.model)
    target = HttpTarget(options.url, model, options.api, key, options.extra)
    try:
        inputs = "as they were recorded"
        if options.api != "tokens":
            async with asyncio.timeout(_ANSWER_S):
                inputs = f"{await target.calibrate():.2f} words a token"
            if context is not None:
                sessions, shortened = fit_context(sessions, context, target.message_tokens)
                inputs += shortened
        turns = sum(len(session.turns) for session in sessions)
        line = f"{len(sessions)} sessions of {turns} turns against {model}; {inputs}"
        error_console().print(line, markup=False)
        records = await run_load(
            target,
            sessions,
            concurrency=options.concurrency,
            arrivals_per_s=options.rate,
            turn_limit_s=options.turn_limit_s,
            seed=options.seed,
        )
        return summarise(records)
    finally:
        await target.close()


def fit_context(
    sessions: list[LoadSession], context: int, message_tokens: int
) -> tuple[list[LoadSession], str]:
    """(sessions shortened to the model's context, a message that says what was changed)."""
    # A margin: inputs are whole words, and an answer may have more tokens when it is tokenised again.
    room = int(context * _CONTEXT_SHARE)
    fitted = [shorten(one, max(0, room - 2 * message_tokens * len(one.turns))) for one in sessions]
    num_shorter = sum(one is not before for one, before in zip(fitted, sessions, strict=True))
    line = f"; {num_shorter} sessions are shortened to the model's context of {context:,} tokens"
    return fitted, line if num_shorter else ""


async def find_model(url: str, key: str | None, wanted: str | None) -> tuple[str, int | None]:
    """(name of the model, the server's first unless `wanted`; its context in tokens, None if not reported).

    Raises UserError if the server lists no model and none was given.
    """
    try:
        async with Client(url.rstrip("/").removesuffix("/v1"), key, within_s=_ANSWER_S) as client:
            models = (await client.ask("GET", "/v1/models"))["data"]
        name = wanted or str(models[0]["id"])
        return name, next((one.get("max_model_len") for one in models if one["id"] == name), None)
    except (EtudeError, KeyError, IndexError, TypeError) as error:
        if wanted is not None:
            return wanted, None
        raise UserError(
            f"the server lists no model: {error}",
            field="url",
            received=url,
            fix="check the address, or give --model",
        ) from error


def print_report(report: LoadReport) -> None:
    """Prints two tables and the errors."""
    hits = "not reported" if report.cache_hit_rate is None else f"{100 * report.cache_hit_rate:.1f} %"
    rows = [
        ("wall time", f"{report.wall_s:.2f} s"),
        ("sessions, turns", f"{report.sessions}, {report.turns}"),
        ("output", f"{report.output_tokens:,} tokens, {report.output_tokens_per_s:,.1f} a second"),
        ("input and output", f"{report.total_tokens_per_s:,.1f} tokens a second"),
        ("turns a second", f"{report.turns_per_s:.2f}"),
        ("input found in the cache", hits),
    ]
    measured = (
        ("time to first token", report.first_token),
        ("from token to token", report.inter_token),
        ("whole turn", report.latency),
    )
    times = ((name, *map(_milliseconds, (one.p50, one.p90, one.p99, one.mean))) for name, one in measured)
    console = output_console()
    print_table(console, (), ((name, Text(value, style="bold")) for name, value in rows))
    console.print()
    print_table(console, ("milliseconds", "p50", "p90", "p99", "mean"), times, range(1, 5))
    for code, count in sorted(report.errors.items()):
        console.print(Text(f"error {code}: {count} turns", style="red"))


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000 * seconds:,.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 success, 1 a turn failed, 2 a usage error, 3 the server failed."""
    options = build_parser().parse_args(arguments)
    try:
        report = asyncio.run(measure_server(options, plan_sessions(options)))
    except TimeoutError:
        print_error(InfrastructureError("the server does not answer", field="url", received=options.url))
        return EXIT_INFRASTRUCTURE
    except EtudeError as error:
        print_error(error)
        return EXIT_INFRASTRUCTURE if isinstance(error, InfrastructureError) else EXIT_MISTAKE
    if options.json:
        print_json(report.to_json())
    else:
        print_report(report)
    return EXIT_ERRORS if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
