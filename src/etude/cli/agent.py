"""`etude agent`: the agent on a repository, in the terminal or behind an editor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from etude.cli.output import output_console, print_json, shown
from etude.errors import ConfigError, EtudeError

if TYPE_CHECKING:
    # Heavier at run time than a command line's help should be.
    from etude.controller.agent.models import ModelChoice

DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}
_TOOL_CALLS = ("native", "text")


def agent_command(
    path: Annotated[Path | None, typer.Argument(help="Directory to work on; here unless named.")] = None,
    run: Annotated[str, typer.Option("--run", help="Run directory: its trained model.")] = "",
    model: Annotated[str, typer.Option("--model", help="Hugging Face checkpoint directory.")] = "",
    endpoint: Annotated[
        str, typer.Option(help="An OpenAI-compatible chat endpoint: http://host:port/v1.")
    ] = "",
    model_name: Annotated[str, typer.Option(help="The endpoint's model.")] = "",
    key_variable: Annotated[
        str, typer.Option(help="Environment variable that holds the endpoint's key.")
    ] = "",
    tool_calls: Annotated[
        str, typer.Option(help="How an endpoint's model calls tools: native, or text.")
    ] = "native",
    context_tokens: Annotated[int, typer.Option(help="Context of the endpoint's model.")] = 128_000,
    temperature: Annotated[float | None, typer.Option(help="How freely it samples.")] = None,
    tools: Annotated[str, typer.Option(help="core, full, or names: read_file,grep,finish.")] = "",
    instruction: Annotated[
        str | None, typer.Option("--instruction", "-p", help="Do this and end; without it, a prompt.")
    ] = None,
    approve: Annotated[
        str | None,
        typer.Option(help="preview, ask, auto-edit or full. At a prompt ask, else preview."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Short for --approve full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON, one on a line.")] = False,
    resume: Annotated[str | None, typer.Option(help="Go on with a session: its id, or last.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List sessions.")] = False,
    index: Annotated[
        str, typer.Option(help="Code index: off, words (instant grep), or meaning (embeddings too).")
    ] = "words",
    acp: Annotated[
        bool, typer.Option("--acp", help="Speak the Agent Client Protocol on stdin and stdout.")
    ] = False,
    backend: Annotated[str, typer.Option(help="Sandbox backend.")] = "local",
    script: Annotated[str, typer.Option(hidden=True, help="Play messages from a file.")] = "",
) -> None:
    """Let the agent work on PATH: in a sandbox that mirrors it, its changes written back as you allow."""
    if list_all:
        print_sessions(as_json)
        return
    # With the parts come numpy and the tokenizers.
    from etude.cli.agent_loop import Work, print_failure, work
    from etude.controller.agent.models import ModelChoice

    if tool_calls not in _TOOL_CALLS:
        raise ConfigError(
            "no such way", field="--tool-calls", received=tool_calls, fix="one of " + ", ".join(_TOOL_CALLS)
        )
    choice: ModelChoice | None = None
    if resume is None or acp or run or model or endpoint or script:
        choice = ModelChoice(
            run=run,
            model=model,
            endpoint=endpoint,
            model_name=model_name,
            key_variable=key_variable,
            native_tools=tool_calls == "native",
            context_tokens=context_tokens,
            temperature=temperature,
            tools=tools,
            index=index,
            script=script,
        )
    mode = _mode(approve, apply)
    if acp:
        assert choice is not None
        _serve_editor(choice, mode or "ask", backend)
        return
    asked = Work(path, choice, instruction, mode, resume, as_json, backend)
    try:
        code = work(asked)
    except EtudeError as error:
        if as_json:
            print_failure(error)
        raise
    if code:
        raise typer.Exit(code)


def _mode(approve: str | None, apply: bool) -> str | None:
    if approve is not None:
        from etude.controller.agent.approval import checked_mode

        checked_mode(approve)
    if apply and approve not in (None, "full"):
        raise ConfigError(
            "says otherwise than --apply", field="--approve", received=approve, fix="leave one of them out"
        )
    return "full" if apply else approve


def _serve_editor(choice: ModelChoice, mode: str, backend: str) -> None:
    try:
        from etude.cli.agent_acp import serve
    except ImportError as error:
        raise ConfigError(
            "editors need the package agent-client-protocol",
            field="--acp",
            received=str(error),
            fix="pip install 'etude[acp]'",
        ) from error
    serve(choice, mode, backend)


def print_sessions(as_json: bool) -> None:
    """The sessions on this machine, last used first."""
    from etude.controller.agent.folders import list_sessions, sessions_directory

    metas = list_sessions(sessions_directory())
    if as_json:
        rows = [
            {"id": one.id, "path": one.path, "title": one.title, "mode": one.mode, "created_s": one.created_s}
            for one in metas
        ]
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("session", "begun", "directory", "first words"):
        table.add_column(heading)
    for one in metas:
        begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.created_s))
        table.add_row(Text(one.id), Text(begun), shown(one.path), shown(one.title))
    output_console().print(table)
