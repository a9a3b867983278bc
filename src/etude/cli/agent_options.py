"""The options of `etude agent`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.errors import ConfigError

if TYPE_CHECKING:
    # Heavier at run time than a command line's help should be.
    from etude.controller.agent.models import ModelChoice

_TOOL_CALLS = ("native", "text")
_MODELS = ("run", "model", "endpoint", "script")
_OF_THE_MODEL = ("model_name", "key_variable", "context_tokens", "temperature", "tools", "index")

PathArgument = Annotated[Path | None, typer.Argument(help="Directory to work on; here unless named.")]
RunOption = Annotated[str, typer.Option("--run", help="Run directory: its trained model.")]
ModelOption = Annotated[str, typer.Option("--model", help="Hugging Face checkpoint directory.")]
EndpointOption = Annotated[str, typer.Option(help="An OpenAI-compatible chat endpoint: http://host:port/v1.")]
ModelNameOption = Annotated[str, typer.Option(help="The endpoint's model.")]
KeyVariableOption = Annotated[str, typer.Option(help="Environment variable that holds the endpoint's key.")]
ToolCallsOption = Annotated[str, typer.Option(help="How an endpoint's model calls tools: native, or text.")]
ContextTokensOption = Annotated[int, typer.Option(help="Context of the endpoint's model.")]
TemperatureOption = Annotated[float | None, typer.Option(help="How freely it samples: 0 or more.")]
ToolsOption = Annotated[str, typer.Option(help="core, full, or names: read_file,grep,finish.")]
InstructionOption = Annotated[
    str | None, typer.Option("--instruction", "-p", help="Do this and end; without it, a prompt.")
]
ApproveOption = Annotated[
    str | None, typer.Option(help="preview, ask, auto-edit or full. At a prompt ask, else preview.")
]
ApplyOption = Annotated[bool, typer.Option("--apply", help="Short for --approve full.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print events as JSON, one on a line.")]
ResumeOption = Annotated[str | None, typer.Option(help="Go on with a session: its id, or last.")]
ListOption = Annotated[bool, typer.Option("--list", help="List sessions.")]
IndexOption = Annotated[
    str, typer.Option(help="Code index: off, words (instant grep), or meaning (embeddings too).")
]
AcpOption = Annotated[
    bool, typer.Option("--acp", help="Speak the Agent Client Protocol on stdin and stdout.")
]
BackendOption = Annotated[str, typer.Option(help="Sandbox backend.")]
ScriptOption = Annotated[str, typer.Option(hidden=True, help="Play messages from a file.")]


def chosen_model(context: typer.Context) -> ModelChoice | None:
    """The model that the options name; None for that of the session which is taken up. Raises ConfigError."""
    # With it come numpy and the tokenizers.
    from etude.controller.agent.models import ModelChoice

    given: Mapping[str, Any] = context.params
    if given["tool_calls"] not in _TOOL_CALLS:
        raise ConfigError(
            "no such way",
            field="--tool-calls",
            received=given["tool_calls"],
            fix="one of " + ", ".join(_TOOL_CALLS),
        )
    if given["resume"] is not None and not given["acp"] and not any(given[name] for name in _MODELS):
        _refuse_options_of_a_model(context)
        return None
    named = {name: given[name] for name in (*_MODELS, *_OF_THE_MODEL)}
    return ModelChoice(**named, native_tools=given["tool_calls"] == "native")


def chosen_mode(approve: str | None, apply: bool) -> str | None:
    """How calls are approved; None: as usual. Raises ConfigError."""
    if approve is not None:
        from etude.controller.agent.approval import checked_mode

        checked_mode(approve)
    if apply and approve not in (None, "full"):
        raise ConfigError(
            "says otherwise than --apply", field="--approve", received=approve, fix="leave one of them out"
        )
    return "full" if apply else approve


def _refuse_options_of_a_model(context: typer.Context) -> None:
    """A session that goes on has its model and tools: an option that would change nothing is a mistake."""
    for name in ("tools", "tool_calls", *_OF_THE_MODEL):
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = f"--{name.replace('_', '-')}"
        if name == "tools":
            message = "the tools belong to the session: it goes on with those that it began with"
            fix = "leave it out, or begin a new session without --resume"
        else:
            message = "belongs to the session's model, and none is named"
            fix = "leave it out, or name the model again: --endpoint, --model or --run"
        raise ConfigError(message, field=option, received=context.params[name], fix=fix)
