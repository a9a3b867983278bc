"""The full tool `run_command`: foreground and background, time limits, input."""

from __future__ import annotations

from etude.agent.tools.background import check_id, kill_command, poll_command, send_input, start_command
from etude.agent.tools.interface import Access, Arguments, ToolContext, integer
from etude.agent.tools.output_files import OUTPUT_BYTES
from etude.agent.tools.run_command import COMMAND, command_of, result_of
from etude.agent.tools.values import flag
from etude.errors import ToolArgumentError
from etude.records import ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

_RUNS = Access(writes=frozenset({".", "command:"}))
_POLLS = Access(writes=frozenset({"command:"}))
"""A poll moves the position up to which output was shown: two polls keep their order."""

_LONGEST_S = 600
"""Longest wait of one call."""


class Terminal:
    """Runs shell commands in the workspace, in the foreground or the background.

    Arguments, one of these forms:
    - `command`, `timeout_s?`: runs it and shows its output, as the short `run_command` does;
    - `command`, `background` = true: starts it and says `started command 1`;
    - `id`, `wait_s?`: output of background command 1 since the last poll, and whether it runs; waits up to
      `wait_s` seconds for its end;
    - `id`, `stdin`: writes a line to its standard input, then polls as above;
    - `id`, `kill` = true: kills it and its child processes.
    Each command runs in a fresh shell that starts in the workspace.
    Limits: `command_timeout_s` unless `timeout_s` says otherwise, up to 600; `wait_s` likewise; 16
    background commands at once; `output_characters`: of more, head and tail are shown, and up to 10 MiB are
    kept in `.etude/outputs/N.txt`. All output of background command 1 is in `.etude/outputs/command-1.txt`.
    Errors: invalid_arguments for an empty command, an unknown `id` and forms that do not fit together;
    timeout; unexpected_environment for input to a command that has ended.
    """

    repeatable = False
    schema = ToolSchema(
        "run_command",
        "Run a shell command in the workspace, or look after one that runs in the background.",
        (
            Parameter(COMMAND.name, COMMAND.description, required=False),
            Parameter("timeout_s", "seconds it may take", required=False, kind="integer"),
            Parameter("background", "true: do not wait for it", required=False, kind="boolean"),
            Parameter("id", "background command to look after", required=False),
            Parameter("wait_s", "seconds to wait for its end", required=False, kind="integer"),
            Parameter("stdin", "line for its standard input", required=False),
            Parameter("kill", "true: end it", required=False, kind="boolean"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        # As in `run`: a blank id counts as missing, an empty line of input does not.
        polls = arguments.get("id", "").strip() and "stdin" not in arguments and not arguments.get("kill")
        return _POLLS if polls else _RUNS

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        _check_form(arguments)
        if arguments.get("id", "").strip():
            return await self._control_background(arguments, context)
        command = command_of(arguments)
        timeout_s = self._seconds(arguments, "timeout_s", context.limits.command_timeout_s)
        try:
            if flag(arguments, "background"):
                started = await start_command(command, context)
                return ToolResult(f"started command {started}", facts={"kind": "command", "background": True})
            result = await context.sandbox.commands.run(command, timeout_s, limit_bytes=OUTPUT_BYTES)
        finally:
            context.changed_somewhere()
        return await result_of(result, context)

    async def _control_background(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        command_id = arguments["id"].strip()
        check_id(context.state, command_id)
        if flag(arguments, "kill"):
            return await kill_command(command_id, context)
        wait_s = self._seconds(arguments, "wait_s", 0)
        if "stdin" in arguments:
            refused = await send_input(command_id, arguments["stdin"], context)
            if refused is not None:
                return refused
        return await poll_command(command_id, context, wait_s)

    def _seconds(self, arguments: Arguments, name: str, default: float) -> float:
        if not arguments.get(name, "").strip():
            return default
        seconds = integer(arguments, name)
        if not 0 <= seconds <= _LONGEST_S or (seconds == 0 and name == "timeout_s"):
            raise ToolArgumentError(f"{name} must be up to {_LONGEST_S}", field=name, received=seconds)
        return float(seconds)


_OF_COMMAND = frozenset({"command", "timeout_s", "background"})
_OF_ID = frozenset({"id", "wait_s", "stdin", "kill"})


def _check_form(arguments: Arguments) -> None:
    """Raises ToolArgumentError if arguments of a new command and of a running one are mixed."""
    given = {name for name, value in arguments.items() if value.strip() or name == "stdin"}
    if "id" in given:
        wrong = sorted(given & _OF_COMMAND)
        if wrong:
            raise ToolArgumentError(f"{wrong[0]} does not go with id", field=wrong[0])
        if flag(arguments, "kill") and given & {"wait_s", "stdin"}:
            raise ToolArgumentError("kill goes with id alone", field="kill")
        return
    wrong = sorted(given & _OF_ID)
    if wrong:
        raise ToolArgumentError(f"{wrong[0]} needs id", field=wrong[0])
    if flag(arguments, "background") and "timeout_s" in given:
        raise ToolArgumentError("timeout_s does not go with background", field="timeout_s")
