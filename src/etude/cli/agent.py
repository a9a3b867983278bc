"""`etude agent`: the agent on a repository, in the terminal or behind an editor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from etude.cli.agent_output import EXIT_CLOSED_PIPE, standard_output
from etude.cli.output import print_json, print_table, shown
from etude.cli.sandbox_options import AllowPrivateOption
from etude.errors import ConfigError, EtudeError

if TYPE_CHECKING:
    # Too heavy to import for printing a help text.
    from etude.config import McpConfig
    from etude.controller.agent.models import ModelChoice

_MODELS = ("run", "model", "endpoint")
_OF_THE_MODEL = ("model_name", "key_variable", "context_tokens", "temperature", "tools", "index")

PathArgument = Annotated[Path | None, typer.Argument(help="Directory to work on. Default: the current one.")]
RunOption = Annotated[str, typer.Option("--run", help="Run directory whose trained model the agent uses.")]
ModelOption = Annotated[str, typer.Option("--model", help="Hugging Face checkpoint that the agent uses.")]
EndpointOption = Annotated[str, typer.Option(help="OpenAI-compatible chat endpoint: http://HOST:PORT/v1.")]
ModelNameOption = Annotated[str, typer.Option(help="Name of the model to request from the endpoint.")]
KeyVariableOption = Annotated[str, typer.Option(help="Environment variable with the endpoint's API key.")]
ToolCallsOption = Annotated[
    Literal["native", "text"], typer.Option(help="How the endpoint's model calls tools.")
]
ContextTokensOption = Annotated[int, typer.Option(help="Context window of the endpoint's model, in tokens.")]
TemperatureOption = Annotated[float | None, typer.Option(help="Sampling temperature, 0 or higher.")]
ToolsOption = Annotated[
    str, typer.Option(help="Tools to offer: core, full, or names such as read_file,grep.")
]
InstructionOption = Annotated[
    str | None,
    typer.Option(
        "--instruction", "-p", help="Carry out this instruction and exit. Default: ask at a prompt."
    ),
]
ApproveOption = Annotated[
    str | None,
    typer.Option(
        help="Approval: preview, ask, auto-edit or full. Default: ask at a prompt or in place, else preview."
    ),
]
ApplyOption = Annotated[bool, typer.Option("--apply", help="Write all changes back: --approve full.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print events as JSON, one per line.")]
ResumeOption = Annotated[str | None, typer.Option(help="Continue a session, by its id or with last.")]
ListOption = Annotated[bool, typer.Option("--list", help="List the stored sessions and exit.")]
IndexOption = Annotated[
    str,
    typer.Option(
        help="Code index: none, grep, words or meaning. Default: words behind an endpoint, otherwise grep."
    ),
]
AcpOption = Annotated[
    bool, typer.Option("--acp", help="Serve an editor on stdin and stdout by the Agent Client Protocol.")
]
BackendOption = Annotated[str, typer.Option(help="Sandbox backend. `etude sandbox doctor` lists them.")]
VenvOption = Annotated[
    str,
    typer.Option(
        metavar="DIR|none",
        help="Python environment to show. Default: the project's .venv or venv, or the active one.",
    ),
]
InPlaceOption = Annotated[
    bool, typer.Option("--in-place", help="Work on the directory itself, not on a copy of it.")
]
ImageOption = Annotated[str, typer.Option(help="Image that commands run in: `etude sandbox image list`.")]
DockerfileOption = Annotated[str, typer.Option(help="Dockerfile to build that image from, in its directory.")]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="HOST[:PORT]", help="Host that commands may reach. Repeatable."),
]
McpOption = Annotated[
    list[str] | None,
    typer.Option("--mcp", metavar="NAME=COMMAND", help="MCP server with tools for the agent. Repeatable."),
]
MaxTurnsOption = Annotated[
    int | None, typer.Option(min=1, help="Most messages of the agent per instruction. Default: no limit.")
]


def agent_command(
    context: typer.Context,
    path: PathArgument = None,
    run: RunOption = "",
    model: ModelOption = "",
    endpoint: EndpointOption = "",
    model_name: ModelNameOption = "",
    key_variable: KeyVariableOption = "",
    tool_calls: ToolCallsOption = "native",
    context_tokens: ContextTokensOption = 128_000,
    temperature: TemperatureOption = None,
    tools: ToolsOption = "",
    instruction: InstructionOption = None,
    approve: ApproveOption = None,
    apply: ApplyOption = False,
    as_json: JsonOption = False,
    resume: ResumeOption = None,
    list_all: ListOption = False,
    index: IndexOption = "",
    acp: AcpOption = False,
    backend: BackendOption = "local",
    venv: VenvOption = "",
    image: ImageOption = "",
    dockerfile: DockerfileOption = "",
    in_place: InPlaceOption = False,
    allow: AllowOption = None,
    allow_private: AllowPrivateOption = None,
    max_turns: MaxTurnsOption = None,
    mcp: McpOption = None,
) -> None:
    """Let the coding agent work on the directory PATH.

    It works in a sandbox on a copy of the directory. Its changes are written back as --approve allows.
    With --in-place it works on the directory itself, and asks before each edit and each command.
    """
    if list_all:
        print_sessions(as_json)
        return
    # The model's options are read from the context. These imports are too heavy for printing a help text.
    choice = chosen_model(context)
    if apply and approve not in (None, "full"):
        raise ConfigError(
            "contradicts --apply", field="--approve", received=approve, fix="leave one of them out"
        )
    mode = "full" if apply else approve
    from etude.controller.agent.approval import checked_mode
    from etude.controller.agent.surroundings import SandboxChoice

    checked_mode(mode or "ask", in_place)
    hosts = tuple(allow or ()), tuple(allow_private or ())
    sandbox = SandboxChoice(backend, venv, image, dockerfile, *hosts, in_place)
    servers = chosen_servers(mcp)
    if acp:
        from etude.cli.agent_acp import serve

        assert choice is not None
        serve(choice, mode or "ask", sandbox, max_turns, servers)
        return
    from etude.cli.agent_loop import AgentRequest, print_failure, run_agent

    try:
        code = run_agent(
            AgentRequest(path, choice, instruction, mode, resume, as_json, sandbox, max_turns, servers)
        )
    except EtudeError as error:
        if as_json:
            print_failure(error)
        raise
    if code:
        raise typer.Exit(code)


def print_sessions(as_json: bool) -> None:
    """Prints the sessions on this machine, last used first."""
    from etude.controller.agent.folders import list_sessions, sessions_directory

    metas = list_sessions(sessions_directory())
    if as_json:
        rows = [
            {"id": m.id, "path": m.path, "title": m.title, "mode": m.mode, "created_s": m.created_s}
            for m in metas
        ]
        print_json(rows)
        return
    output, begun = standard_output(), "%Y-%m-%d %H:%M"
    rows = (
        (m.id, time.strftime(begun, time.localtime(m.created_s)), shown(m.path), shown(m.title))
        for m in metas
    )
    print_table(output.console(), ("session", "started", "directory", "first words"), rows)
    if output.reader_gone:
        raise typer.Exit(EXIT_CLOSED_PIPE)


def chosen_model(context: typer.Context) -> ModelChoice | None:
    """The model that the options name; None for that of the resumed session. Raises ConfigError."""
    # Imports numpy and the tokenizers.
    from etude.controller.agent.models import ModelChoice

    given: Mapping[str, Any] = context.params
    if given["resume"] is not None and not given["acp"] and not any(given[name] for name in _MODELS):
        _refuse_options_of_a_model(context)
        return None
    named = {name: given[name] for name in (*_MODELS, *_OF_THE_MODEL)}
    return ModelChoice(**named, native_tools=given["tool_calls"] == "native")


def chosen_servers(commands: list[str] | None) -> dict[str, McpConfig]:
    """The MCP servers named by `--mcp`. Raises ConfigError."""
    if not commands:
        return {}
    from etude.agent.mcp.client import parse_server

    named = [parse_server(command) for command in commands]
    servers = dict(named)
    if len(servers) < len(named):
        names = ", ".join(name for name, _ in named)
        raise ConfigError("names a server twice", field="--mcp", received=names, fix="give each its own name")
    return servers


def _refuse_options_of_a_model(context: typer.Context) -> None:
    """Raises ConfigError for options without effect on the model and tools of a resumed session."""
    for name in ("tools", "tool_calls", *_OF_THE_MODEL):
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = f"--{name.replace('_', '-')}"
        if name == "tools":
            message = "a resumed session keeps the tools that it started with"
            fix = "leave it out, or begin a new session without --resume"
        else:
            message = "has no effect on a resumed session unless a model is named"
            fix = "leave it out, or name the model again: --endpoint, --model or --run"
        raise ConfigError(message, field=option, received=context.params[name], fix=fix)
