"""Background commands: start, poll, kill; their output goes to files of the workspace.

The output is in `.etude/outputs/command-N.txt` inside the sandbox: it survives when a session is resumed by
another process, it takes no memory of ours, and the agent can search it like any file. A command that prints
more than the sandbox's largest file is killed by the kernel, like one that writes such a file. The state kept
of a command is a few integers in `ToolState.commands`.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from etude.agent.tools.interface import ToolContext, failure
from etude.agent.tools.output_files import OUTPUT_BYTES, OUTPUTS, bounded, readable, write_harness_file
from etude.agent.tools.state import BackgroundState, ToolState
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.errors import PathKindError, PathMissingError, PathOutsideError

NUM_RUNNING = 16
"""Background commands of one session that may run at once."""


@dataclass(slots=True)
class BackgroundCommand:
    """One background command of a session; `save` writes changes to the session's state."""

    id: str
    pid: int
    """Process id inside the sandbox."""
    shown_bytes: int = 0
    """Bytes of its output shown so far."""
    exit_code: int | None = None
    """None until its end was observed."""

    @property
    def output_path(self) -> str:
        """The file that takes its output."""
        return f"{OUTPUTS}/command-{self.id}.txt"

    def save(self, state: ToolState) -> None:
        """Writes it to the session's state."""
        state.commands[self.id] = BackgroundState(self.pid, self.shown_bytes, self.exit_code)


def background_commands(state: ToolState) -> list[BackgroundCommand]:
    """All commands that the session has started, oldest first."""
    return [
        BackgroundCommand(name, known.pid, known.shown_bytes, known.exit_code)
        for name, known in state.commands.items()
    ]


def find_command(state: ToolState, command_id: str) -> BackgroundCommand:
    """The command of that id. Raises ToolArgumentError, naming existing ones."""
    commands = background_commands(state)
    for command in commands:
        if command.id == command_id:
            return command
    ids = ", ".join(command.id for command in commands[-8:])
    message = f"no command {command_id[:20]}: there is {ids}" if ids else "no command was started"
    raise ToolArgumentError(message, field="id", received=command_id[:20])


async def start_command(line: str, context: ToolContext) -> BackgroundCommand:
    """Starts `line` in the background, in the workspace.

    Raises ToolArgumentError if too many run already, and as `Commands.start`.
    """
    state = context.state
    commands = background_commands(state)
    if sum(command.exit_code is None for command in commands) >= NUM_RUNNING:
        await _update_exit_codes(commands, context)
        if sum(command.exit_code is None for command in commands) >= NUM_RUNNING:
            raise ToolArgumentError(f"{NUM_RUNNING} commands run already: kill one", field="background")
    command = BackgroundCommand(str(len(commands) + 1), 0)
    await write_harness_file(command.output_path, b"", context)
    # Redirected by the shell itself: the command never blocks on a full pipe.
    script = f"exec >>{command.output_path} 2>&1\n{line}"
    command.pid = (await context.sandbox.commands.start(script)).pid
    command.save(state)
    return command


async def poll_command(command: BackgroundCommand, context: ToolContext, wait_s: float) -> ToolResult:
    """Its output since it was last shown, and whether it runs; waits up to `wait_s` for its end."""
    if command.exit_code is None:
        await _update_exit_code(command, context, wait_s)
        context.changed_somewhere()
        # The end can be observed only once: it is saved before anything else can fail.
        command.save(context.state)
    parts = [await _new_output(command, context)]
    facts: dict[str, str | int | float | bool] = {"kind": "poll", "running": command.exit_code is None}
    if command.exit_code is None:
        parts.append(f"command {command.id} runs")
    elif command.exit_code == _GONE:
        parts.append(f"error: command {command.id} is gone: the sandbox was restored without its processes")
    else:
        parts.append(f"command {command.id} has ended: exit {command.exit_code}")
        facts["exit_code"] = command.exit_code
    command.save(context.state)
    error = ToolErrorClass.UNEXPECTED_ENVIRONMENT if command.exit_code == _GONE else None
    return ToolResult("\n".join(part for part in parts if part), error, facts=facts)


async def kill_command(command: BackgroundCommand, context: ToolContext) -> ToolResult:
    """Kills it and its child processes, and shows the rest of its output."""
    if command.exit_code is None:
        await context.sandbox.commands.kill(command.pid)
    return await poll_command(command, context, wait_s=_KILL_S)


async def send_input(command: BackgroundCommand, text: str, context: ToolContext) -> ToolResult | None:
    """Writes a line to its standard input. Returns None, or the result that says why it could not."""
    if command.exit_code is None:
        await _update_exit_code(command, context, 0.0)
    if command.exit_code is not None:
        command.save(context.state)
        return failure(f"command {command.id} has ended", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
    await context.sandbox.commands.send_stdin(command.pid, text if text.endswith("\n") else text + "\n")
    return None


_GONE = -1000
"""In place of an exit code: the command no longer runs, and its end was not observed."""
_KILL_S = 30.0


async def _update_exit_codes(commands: list[BackgroundCommand], context: ToolContext) -> None:
    for command in commands:
        if command.exit_code is None:
            await _update_exit_code(command, context, 0.0)
            command.save(context.state)


async def _update_exit_code(command: BackgroundCommand, context: ToolContext, wait_s: float) -> None:
    """Sets the exit code if the command has ended, or ends within `wait_s`."""
    rows = {row.pid: row for row in await context.sandbox.commands.list()}
    row = rows.get(command.pid)
    if row is None:
        command.exit_code = _GONE
        return
    if row.running and wait_s <= 0:
        return
    handle = await context.sandbox.commands.connect(command.pid)
    try:
        command.exit_code = (await handle.wait(wait_s if row.running else _KILL_S)).exit_code
    except TimeoutError:
        return


async def _new_output(command: BackgroundCommand, context: ToolContext) -> str:
    """Output since the last poll, as text; a character that is still incomplete is left for the next."""
    try:
        data = await context.sandbox.files.read(command.output_path, OUTPUT_BYTES)
    except (PathMissingError, PathKindError, PathOutsideError) as error:
        return f"(no output: {command.output_path}: {error.message})"
    # The agent may have emptied the file.
    command.shown_bytes = min(command.shown_bytes, len(data))
    new = data[command.shown_bytes :]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(new, final=command.exit_code is not None)
    command.shown_bytes += len(new) - len(decoder.getstate()[0])
    if command.shown_bytes >= OUTPUT_BYTES:
        text += f"\n... over {OUTPUT_BYTES >> 20} MiB: see the end of {command.output_path} by a command"
    return await bounded(readable(text).rstrip("\n"), context)
