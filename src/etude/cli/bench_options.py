"""The options of `etude bench serve`, and the sessions that they ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from etude.errors import ConfigError, UserError

if TYPE_CHECKING:
    from etude.inference.load import LoadSession

_OPTIONS = {
    "turns": "--turns",
    "prompt_tokens": "--prompt",
    "observation_tokens": "--observation",
    "output_tokens": "--output",
    "lognormal": "--turns, --output or --tools",
}
"""Which option a field of the workload comes from."""

UrlArgument = Annotated[str, typer.Argument(help="Address of the server: http://HOST:PORT.")]
ModelOption = Annotated[str | None, typer.Option(help="Model to request. Default: the server's first one.")]
ApiOption = Annotated[
    Literal["chat", "completions", "tokens"],
    typer.Option(help="API to call: with made-up words, or with recorded token ids (tokens)."),
]
SessionsOption = Annotated[int, typer.Option(min=1, help="Number of sessions to run.")]
TurnsOption = Annotated[str, typer.Option(help="Turns per session: MEDIAN or MEDIAN-P99 (lognormal).")]
PromptOption = Annotated[str, typer.Option(help="Tokens of the first prompt: LOW-HIGH (uniform).")]
ObservationOption = Annotated[str, typer.Option(help="Tokens of each later input: LOW-HIGH (uniform).")]
OutputOption = Annotated[str, typer.Option(help="Tokens of each answer: MEDIAN-P99 (lognormal).")]
ToolsOption = Annotated[str, typer.Option(help="Seconds between two turns: MEDIAN-P99 (lognormal).")]
RecordedOption = Annotated[
    Path | None,
    typer.Option(help="Replay the sessions of a run, a trajectory log or ATIF files."),
]
ConcurrencyOption = Annotated[
    int | None, typer.Option(min=1, help="Sessions at the same time. Default: all.")
]
RateOption = Annotated[float | None, typer.Option(min=1e-6, help="Mean arrivals of sessions per second.")]
TurnLimitOption = Annotated[float, typer.Option(min=0.1, help="Time limit of one turn in seconds.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn at random.")]
KeyFileOption = Annotated[Path | None, typer.Option(help="File that holds the server's bearer token.")]
ExtraOption = Annotated[str, typer.Option(help="JSON object of further fields for each request.")]


def check_load(api: str, recorded: Path | None, concurrency: int | None, rate: float | None) -> None:
    """Raises UserError for options that make no sense together."""
    if api == "tokens" and recorded is None:
        raise UserError(
            "needs recorded sessions, which hold token ids", field="--api", received=api, fix="add --recorded"
        )
    if concurrency is not None and rate is not None:
        raise UserError(
            "cannot be combined with --concurrency", field="--rate", received=rate, fix="leave one out"
        )


def made_up_sessions(
    sessions: int, turns: str, prompt: str, observation: str, output: str, tools: str, seed: int
) -> list[LoadSession]:
    """Synthetic sessions as the options say. Raises UserError."""
    from etude.inference.load import LogNormal, WorkloadShape, synthetic_sessions

    try:
        shape = WorkloadShape(
            num_sessions=sessions,
            turns=LogNormal(*_pair(turns, "--turns")),
            prompt_tokens=_whole(prompt, "--prompt"),
            output_tokens=LogNormal(*_pair(output, "--output")),
            observation_tokens=_whole(observation, "--observation"),
            tool_s=LogNormal(*_pair(tools, "--tools")),
        )
    except ConfigError as error:
        option = _OPTIONS.get(error.field or "", error.field)
        raise UserError(error.message, field=option, received=error.received, fix=error.fix) from error
    return synthetic_sessions(shape, seed)


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


def read_object(text: str) -> dict[str, Any]:
    """The value of `--extra`. Raises UserError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"is not valid JSON: {error}", field="--extra", received=text) from error
    if not isinstance(found, dict):
        raise UserError("must be a JSON object", field="--extra", received=text)
    return found
