"""`etude bench`: load a server with agent sessions, and print what they saw."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from etude.cli.bench_options import (
    ApiOption,
    ConcurrencyOption,
    ExtraOption,
    KeyFileOption,
    ModelOption,
    ObservationOption,
    OutputOption,
    PromptOption,
    RateOption,
    RecordedOption,
    SeedOption,
    SessionsOption,
    ToolsOption,
    TurnLimitOption,
    TurnsOption,
    UrlArgument,
    check_load,
    made_up_sessions,
    read_object,
)
from etude.cli.exits import error_console
from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.errors import EtudeError, InfrastructureError, UserError
from etude.kit.secrets import read_secret_file

if TYPE_CHECKING:
    from etude.inference.load import LoadReport, LoadSession

bench_app = typer.Typer(name="bench", help="Measure a server under load.", no_args_is_help=True)

EXIT_ERRORS = 1
_ANSWER_S = 30.0
_CONTEXT_SHARE = 0.85
"""Of a model's context, what the lengths of a session may fill as they are planned."""


@bench_app.command("serve")
def bench_serve_command(
    url: UrlArgument,
    model: ModelOption = None,
    api: ApiOption = "chat",
    sessions: SessionsOption = 32,
    turns: TurnsOption = "6",
    prompt: PromptOption = "200-800",
    observation: ObservationOption = "20-200",
    output: OutputOption = "40-400",
    tools: ToolsOption = "0",
    recorded: RecordedOption = None,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    turn_limit_s: TurnLimitOption = 600.0,
    seed: SeedOption = 0,
    key_file: KeyFileOption = None,
    extra: ExtraOption = "{}",
    as_json: JsonOption = False,
) -> None:
    """Send agent sessions to a server and measure its speed.

    The exit code is 1 if any turn was not answered completely.
    """
    from etude.inference.load import run_load, summarise
    from etude.inference.load.http_target import HttpTarget
    from etude.inference.load.recorded import recorded_sessions

    check_load(api, recorded, concurrency, rate)
    if recorded is not None:
        played = recorded_sessions(recorded, sessions)
    else:
        played = made_up_sessions(sessions, turns, prompt, observation, output, tools, seed)
    bearer = read_secret_file(key_file, "--key-file")
    more = read_object(extra)

    async def play() -> LoadReport:
        name, context = await _served_model(url, bearer, model)
        target = HttpTarget(url, name, api, bearer, more)
        try:
            fitted, inputs = played, "as they were recorded"
            if api != "tokens":
                async with asyncio.timeout(_ANSWER_S):
                    inputs = f"{await target.calibrate():.2f} words a token"
                if context is not None:
                    fitted, said = _fitted(played, context, target.message_tokens)
                    inputs += said
            _tell(fitted, name, inputs)
            records = await run_load(
                target,
                fitted,
                concurrency=concurrency,
                arrivals_per_s=rate,
                turn_limit_s=turn_limit_s,
                seed=seed,
            )
            return summarise(records)
        finally:
            await target.close()

    try:
        report = asyncio.run(play())
    except TimeoutError as error:
        raise InfrastructureError("the server does not answer", field="url", received=url) from error
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.errors:
        raise typer.Exit(EXIT_ERRORS)


def _tell(sessions: list[LoadSession], model: str, inputs: str) -> None:
    turns = sum(len(session.turns) for session in sessions)
    console = error_console()
    console.print(f"{len(sessions)} sessions of {turns} turns against {model}; {inputs}", markup=False)


def _fitted(sessions: list[LoadSession], context: int, message_tokens: int) -> tuple[list[LoadSession], str]:
    """The sessions, none longer than the model's context, and what was done to them, for people."""
    from etude.inference.load.workload import shorten

    # Words are whole, and what a model says may be other tokens when it is read again.
    room = int(context * _CONTEXT_SHARE)
    fitted = [shorten(one, max(0, room - 2 * message_tokens * len(one.turns))) for one in sessions]
    num_shorter = sum(one is not before for one, before in zip(fitted, sessions, strict=True))
    said = f"; {num_shorter} sessions are shortened to the model's context of {context:,} tokens"
    return fitted, said if num_shorter else ""


async def _served_model(url: str, key: str | None, wanted: str | None) -> tuple[str, int | None]:
    """The model to ask for, the first unless one is named, and its context in tokens if the server says so.

    Raises UserError where the server names no model and none was named.
    """
    from etude.serving.client import Client

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


def _print(report: LoadReport) -> None:
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
