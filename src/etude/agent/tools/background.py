"""Background commands: start, poll, kill; their output goes to files of the workspace.

The output is in `.etude/outputs/command-N.txt` inside the sandbox: it survives when a session is resumed by
another process, it takes no memory of ours, and the agent can search it like any file. A command that prints
more than the sandbox's largest file is killed by the kernel, like one that writes such a file. The state kept
of a command is a few integers in `ToolState.commands`.
"""

from __future__ import annotations

import codecs
import contextlib

from etude.agent.tools.interface import ToolContext, failure
from etude.agent.tools.output_files import OUTPUT_BYTES, OUTPUTS, bounded, readable, write_harness_file
from etude.agent.tools.state import BackgroundState, ToolState
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.errors import PathKindError, PathMissingError, PathOutsideError

NUM_RUNNING = 16
"""Background commands of one session that may run at once."""


def check_id(state: ToolState, command_id: str) -> None:
    """Raises ToolArgumentError, naming existing ones, if the session started no command of that id."""
    if command_id not in state.commands:
        ids = ", ".join(list(state.commands)[-8:])
        message = f"no command {command_id[:20]}: there is {ids}" if ids else "no command was started"
        raise ToolArgumentError(message, field="id", received=command_id[:20])


async def start_command(line: str, context: ToolContext) -> str:
    """Starts `line` in the background, in the workspace; returns its id.

    Raises ToolArgumentError if too many run already, and as `Commands.start`.
    """
    commands = context.state.commands
    running = [command for command in commands.values() if command.exit_code is None]
    if len(running) >= NUM_RUNNING:
        for command in running:
            await _update_exit_code(command, context, 0.0)
        if sum(command.exit_code is None for command in running) >= NUM_RUNNING:
            raise ToolArgumentError(f"{NUM_RUNNING} commands run already: kill one", field="background")
    command_id = str(len(commands) + 1)
    await write_harness_file(_output_path(command_id), b"", context)
    # Redirected by the shell itself: the command never blocks on a full pipe.
    script = f"exec >>{_output_path(command_id)} 2>&1\n{line}"
    commands[command_id] = BackgroundState((await context.sandbox.commands.start(script)).pid)
    return command_id


async def poll_command(command_id: str, context: ToolContext, wait_s: float) -> ToolResult:
    """Its output since it was last shown, and whether it runs; waits up to `wait_s` for its end."""
    command = context.state.commands[command_id]
    if command.exit_code is None:
        await _update_exit_code(command, context, wait_s)
        context.changed_somewhere()
    parts = [await _new_output(command_id, context)]
    facts: dict[str, str | int | float | bool] = {"kind": "poll", "running": command.exit_code is None}
    error = None
    if command.exit_code is None:
        parts.append(f"command {command_id} runs")
    elif command.exit_code == _GONE:
        parts.append(f"error: command {command_id} is gone: the sandbox was restored without its processes")
        error = ToolErrorClass.UNEXPECTED_ENVIRONMENT
    else:
        parts.append(f"command {command_id} has ended: exit {command.exit_code}")
        facts["exit_code"] = command.exit_code
    return ToolResult("\n".join(part for part in parts if part), error, facts=facts)


async def kill_command(command_id: str, context: ToolContext) -> ToolResult:
    """Kills it and its child processes, and shows the rest of its output."""
    command = context.state.commands[command_id]
    if command.exit_code is None:
        await context.sandbox.commands.kill(command.pid)
    return await poll_command(command_id, context, wait_s=_KILL_S)


async def send_input(command_id: str, text: str, context: ToolContext) -> ToolResult | None:
    """Writes a line to its standard input. Returns None, or the result that says why it could not."""
    command = context.state.commands[command_id]
    if command.exit_code is None:
        await _update_exit_code(command, context, 0.0)
    if command.exit_code is not None:
        return failure(f"command {command_id} has ended", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
    await context.sandbox.commands.send_stdin(command.pid, text if text.endswith("\n") else text + "\n")
    return None


_GONE = -1000
"""In place of an exit code: the command no longer runs, and its end was not observed."""
_KILL_S = 30.0


def _output_path(command_id: str) -> str:
    """The file that takes a command's output."""
    return f"{OUTPUTS}/command-{command_id}.txt"


async def _update_exit_code(command: BackgroundState, context: ToolContext, wait_s: float) -> None:
    """Sets the exit code if the command has ended, or ends within `wait_s`. It can be observed only once."""
    rows = {row.pid: row for row in await context.sandbox.commands.list()}
    row = rows.get(command.pid)
    if row is None:
        command.exit_code = _GONE
        return
    if row.running and wait_s <= 0:
        return
    handle = await context.sandbox.commands.connect(command.pid)
    with contextlib.suppress(TimeoutError):
        command.exit_code = (await handle.wait(wait_s if row.running else _KILL_S)).exit_code


async def _new_output(command_id: str, context: ToolContext) -> str:
    """Output since the last poll, as text; a character that is still incomplete is left for the next."""
    command, path = context.state.commands[command_id], _output_path(command_id)
    try:
        data = await context.sandbox.files.read(path, OUTPUT_BYTES)
    except (PathMissingError, PathKindError, PathOutsideError) as error:
        return f"(no output: {path}: {error.message})"
    # The agent may have emptied the file.
    shown_bytes = min(command.shown_bytes, len(data))
    new = data[shown_bytes:]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(new, final=command.exit_code is not None)
    shown_bytes += len(new) - len(decoder.getstate()[0])
    if shown_bytes >= OUTPUT_BYTES:
        text += f"\n... over {OUTPUT_BYTES >> 20} MiB: see the end of {path} by a command"
    output = await bounded(readable(text).rstrip("\n"), context)
    command.shown_bytes = shown_bytes
    return output
