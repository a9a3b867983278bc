"""`etude bench`: load a server with agent sessions, and print what they saw."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from etude.cli.bench_options import (
    ApiOption,
    ConcurrencyOption,
    ExtraOption,
    JsonOption,
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
    read_key,
    read_object,
)
from etude.cli.exits import error_console
from etude.cli.output import output_console, print_json
from etude.errors import InfrastructureError, UserError

if TYPE_CHECKING:
    from etude.inference.load import LoadReport, LoadSession

bench_app = typer.Typer(name="bench", help="Measure a server under load.", no_args_is_help=True)

EXIT_ERRORS = 1
_TOLD_S = 30.0


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
    """Play agent sessions against a server. Exit code 1 if any turn was not answered whole."""
    from etude.inference.load.recorded import recorded_sessions

    check_load(api, recorded, concurrency, rate)
    if recorded is not None:
        played = recorded_sessions(recorded, sessions)
    else:
        played = made_up_sessions(sessions, turns, prompt, observation, output, tools, seed)
    load = _Load(
        url, model, api, read_key(key_file), read_object(extra), concurrency, rate, turn_limit_s, seed
    )
    try:
        report = asyncio.run(load.play(played))
    except TimeoutError as error:
        raise InfrastructureError("the server does not answer", field="url", received=url) from error
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.errors:
        raise typer.Exit(EXIT_ERRORS)


@dataclass(frozen=True, slots=True)
class _Load:
    """How a server is loaded."""

    url: str
    model: str | None
    api: str
    key: str | None
    extra: dict[str, Any]
    concurrency: int | None
    arrivals_per_s: float | None
    turn_limit_s: float
    seed: int

    async def play(self, sessions: list[LoadSession]) -> LoadReport:
        """Plays the sessions; says on stderr what it is about to do. Raises LoadError, TimeoutError."""
        from etude.inference.load import run_load, summarise
        from etude.inference.load.http_target import HttpTarget

        name = self.model or await _first_model(self.url, self.key)
        target = HttpTarget(self.url, name, self.api, self.key, self.extra)  # type: ignore[arg-type]
        try:
            inputs = "as they were recorded"
            if self.api != "tokens":
                async with asyncio.timeout(_TOLD_S):
                    inputs = f"{await target.calibrate():.2f} words a token"
            _tell(sessions, name, inputs)
            records = await run_load(
                target,
                sessions,
                concurrency=self.concurrency,
                arrivals_per_s=self.arrivals_per_s,
                turn_limit_s=self.turn_limit_s,
                seed=self.seed,
            )
        finally:
            await target.close()
        return summarise(records)


def _tell(sessions: list[LoadSession], model: str, inputs: str) -> None:
    turns = sum(len(session.turns) for session in sessions)
    console = error_console()
    console.print(f"{len(sessions)} sessions of {turns} turns against {model}; {inputs}", markup=False)


async def _first_model(url: str, key: str | None) -> str:
    """Raises UserError where the server names none."""
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        async with httpx.AsyncClient(timeout=_TOLD_S, trust_env=False) as http:
            response = await http.get(f"{base}/v1/models", headers=headers)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"names no model: {error}", field="url", received=url, fix="check the address, or give --model"
        ) from error


def _print(report: LoadReport) -> None:
    hits = "not told" if report.cache_hit_rate is None else f"{100 * report.cache_hit_rate:.1f} %"
    rows = [
        ("wall time", f"{report.wall_s:.2f} s"),
        ("sessions, turns", f"{report.sessions}, {report.turns}"),
        ("output", f"{report.output_tokens:,} tokens, {report.output_tokens_per_s:,.1f} a second"),
        ("input and output", f"{report.total_tokens_per_s:,.1f} tokens a second"),
        ("turns a second", f"{report.turns_per_s:.2f}"),
        ("input found in the cache", hits),
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value, style="bold"))
    times = Table(box=None, pad_edge=False)
    for name in ("milliseconds", "p50", "p90", "p99", "mean"):
        times.add_column(name, justify="left" if name == "milliseconds" else "right")
    for name, one in (
        ("time to first token", report.first_token),
        ("from token to token", report.inter_token),
        ("whole turn", report.latency),
    ):
        times.add_row(name, *(_milliseconds(value) for value in (one.p50, one.p90, one.p99, one.mean)))
    console = output_console()
    console.print(table)
    console.print()
    console.print(times)
    for code, count in sorted(report.errors.items()):
        console.print(Text(f"error {code}: {count} turns", style="red"))


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000 * seconds:,.1f}"
