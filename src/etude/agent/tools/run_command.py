"""The minimal tool `run_command`: one shell command in the foreground."""

from __future__ import annotations

from etude.agent.tools.interface import WRITES_ALL, Access, Arguments, ToolContext
from etude.agent.tools.output_files import OUTPUT_BYTES, bounded, readable
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.types import CommandResult
from etude.tokens.grammar import Parameter, ToolSchema

COMMAND = Parameter("command", "the command line")


class RunCommand:
    """Runs a shell command in the workspace and shows its output, standard error after standard output.

    Each command runs in a fresh shell that starts in the workspace: directory and variables are not kept.
    Arguments: `command`.
    Returns the output; `exit 1` on a line of its own where the exit code is not 0; `ok` where both are
    empty. Escape sequences and progress bars are made readable.
    Limits: `command_timeout_s`; `output_characters`: beyond it, head and tail are shown, and up to 10 MiB are
    kept in `.etude/outputs/N.txt`.
    Errors: invalid_arguments for an empty command; timeout where it runs too long: what it printed is shown,
    what it started is killed. A failing command is no error of the tool.
    """

    repeatable = False
    schema = ToolSchema("run_command", "Run a shell command in the workspace.", (COMMAND,))

    def access(self, arguments: Arguments) -> Access:
        return WRITES_ALL

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        command = command_of(arguments)
        try:
            result = await context.sandbox.commands.run(
                command, context.limits.command_timeout_s, limit_bytes=OUTPUT_BYTES
            )
        finally:
            context.changed_somewhere()
        return await result_of(result, context)


def command_of(arguments: Arguments) -> str:
    """The argument `command`. Raises ToolArgumentError if it is empty."""
    command = arguments.get("command", "")
    if not command.strip():
        raise ToolArgumentError("command is empty", field="command")
    return command


async def result_of(result: CommandResult, context: ToolContext) -> ToolResult:
    """The result shown for a command that has ended."""
    streams = (result.stdout.rstrip("\n"), result.stderr.rstrip("\n"))
    printed = readable("\n".join(stream for stream in streams if stream))
    parts = [await bounded(printed, context)]
    if result.truncated:
        parts.append("... cut")
    error = None
    if result.timed_out:
        error = ToolErrorClass.TIMEOUT
        parts.append("error: command timed out")
    elif result.exit_code != 0:
        parts.append(f"exit {result.exit_code}")
    output = "\n".join(part for part in parts if part)
    return ToolResult(output or "ok", error, facts={"kind": "command", "exit_code": result.exit_code})
