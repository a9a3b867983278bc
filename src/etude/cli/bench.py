"""`etude bench`: load a server with agent sessions, and print what they saw."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

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
    url: Annotated[str, typer.Argument(help="Address of the server: http://HOST:PORT.")],
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; the server's first if left out.")
    ] = None,
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions.")] = 32,
    turns: Annotated[str, typer.Option(help="Turns of a session: MEDIAN, or MEDIAN-P99 (lognormal).")] = "6",
    prompt: Annotated[str, typer.Option(help="Tokens of the first input: LOW-HIGH.")] = "200-800",
    observation: Annotated[str, typer.Option(help="Tokens of later inputs: LOW-HIGH.")] = "20-200",
    output: Annotated[str, typer.Option(help="Tokens of an answer: MEDIAN-P99 (lognormal).")] = "40-400",
    tools: Annotated[str, typer.Option(help="Seconds between turns: MEDIAN-P99 (lognormal).")] = "0",
    recorded: Annotated[
        Path | None, typer.Option(help="Trajectory log or ATIF files, whose lengths are played instead.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at a time; all if left out.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Sessions per second that come by chance.")
    ] = None,
    turn_limit_s: Annotated[
        float, typer.Option(min=0.1, help="A turn unanswered so long is an error.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    key_file: Annotated[Path | None, typer.Option(help="File with the server's bearer token.")] = None,
    extra: Annotated[str, typer.Option(help="Further fields of every request, as a JSON object.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Play agent sessions against a server. Exit code 1 if any turn was not answered whole."""
    from etude.inference.load import LogNormal, WorkloadShape, run_load, summarise, synthetic_sessions
    from etude.inference.load.http_target import HttpTarget
    from etude.inference.load.recorded import recorded_sessions

    if api not in ("chat", "completions"):
        raise UserError("no such API", field="--api", received=api, fix="chat or completions")
    if recorded is not None:
        played = recorded_sessions(recorded, sessions)
    else:
        shape = WorkloadShape(
            num_sessions=sessions,
            turns=LogNormal(*_pair(turns, "--turns")),
            prompt_tokens=_whole(prompt, "--prompt"),
            output_tokens=LogNormal(*_pair(output, "--output")),
            observation_tokens=_whole(observation, "--observation"),
            tool_s=LogNormal(*_pair(tools, "--tools")),
        )
        played = synthetic_sessions(shape, seed)
    key = _read_key(key_file)
    fields = _object(extra)

    async def work() -> LoadReport:
        name = model or await _first_model(url, key)
        target = HttpTarget(url, name, api, key, fields)
        try:
            async with asyncio.timeout(_TOLD_S):
                words = await target.calibrate()
            _tell(played, name, words)
            records = await run_load(
                target,
                played,
                concurrency=concurrency,
                arrivals_per_s=rate,
                turn_limit_s=turn_limit_s,
                seed=seed,
            )
        finally:
            await target.close()
        return summarise(records)

    try:
        report = asyncio.run(work())
    except TimeoutError as error:
        raise InfrastructureError("the server does not answer", field="url", received=url) from error
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.errors:
        raise typer.Exit(EXIT_ERRORS)


def _tell(sessions: list[LoadSession], model: str, words_per_token: float) -> None:
    turns = sum(len(session.turns) for session in sessions)
    error_console().print(
        f"{len(sessions)} sessions of {turns} turns against {model}; {words_per_token:.2f} words a token",
        markup=False,
    )


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


def _pair(text: str, option: str) -> tuple[float, float]:
    """MEDIAN or MEDIAN-P99. Raises UserError."""
    low, _, high = text.partition("-")
    try:
        return float(low), float(high or low)
    except ValueError as error:
        raise UserError("must be A or A-B", field=option, received=text, fix="such as 40-400") from error


def _whole(text: str, option: str) -> tuple[int, int]:
    low, high = _pair(text, option)
    return round(low), round(high)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"is no JSON: {error}", field="--extra", received=text) from error
    if not isinstance(found, dict):
        raise UserError("must be a JSON object", field="--extra", received=text)
    return found


def _read_key(path: Path | None) -> str | None:
    try:
        return path.read_text().strip() if path is not None else None
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", field="--key-file", received=str(path), fix="name another"
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
        times.add_row(name, *(f"{1000 * value:,.1f}" for value in (one.p50, one.p90, one.p99, one.mean)))
    console = output_console()
    console.print(table)
    console.print()
    console.print(times)
    for code, count in sorted(report.errors.items()):
        console.print(Text(f"error {code}: {count} turns", style="red"))
