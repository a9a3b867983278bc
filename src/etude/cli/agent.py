"""`etude agent`: the agent on a repository, in the terminal or behind an editor."""

from __future__ import annotations

import time

import typer

from etude.cli.agent_options import (
    AcpOption,
    AllowOption,
    ApplyOption,
    ApproveOption,
    BackendOption,
    ContextTokensOption,
    DockerfileOption,
    EndpointOption,
    ImageOption,
    IndexOption,
    InPlaceOption,
    InstructionOption,
    JsonOption,
    KeyVariableOption,
    ListOption,
    MaxTurnsOption,
    McpOption,
    ModelNameOption,
    ModelOption,
    PathArgument,
    ResumeOption,
    RunOption,
    TemperatureOption,
    ToolCallsOption,
    ToolsOption,
    VenvOption,
    chosen_mode,
    chosen_model,
    chosen_servers,
)
from etude.cli.agent_output import EXIT_CLOSED_PIPE, standard_output
from etude.cli.output import print_json, print_table, shown
from etude.cli.sandbox_options import AllowPrivateOption
from etude.errors import EtudeError

DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


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
    mode = chosen_mode(approve, apply)
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
