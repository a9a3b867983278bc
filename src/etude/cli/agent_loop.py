"""The main program of `etude agent`: one instruction, or a conversation at a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.agent_input import Lines
from etude.cli.agent_output import EXIT_CLOSED_PIPE, standard_error, standard_output
from etude.cli.agent_terminal import TerminalFace, TerminalUser
from etude.cli.exits import EXIT_INTERRUPTED, print_error
from etude.cli.output import shown
from etude.controller.agent.approval import MODE_HELP
from etude.controller.agent.changes import diff_text
from etude.controller.agent.conversation import (
    STOPPED_BY_USER,
    Conversation,
    Frontend,
    Outcome,
    open_conversation,
)
from etude.controller.agent.events import AgentEvent, event_document
from etude.controller.agent.folders import SessionFolder, SessionMeta, sessions_directory
from etude.controller.agent.models import ModelChoice, open_policy
from etude.controller.agent.surroundings import SandboxChoice, open_surroundings
from etude.controller.agent.trees import DirectoryTree
from etude.controller.agent.workspace import EVERYTHING
from etude.errors import (
    AgentError,
    ConfigError,
    EtudeError,
    InfrastructureError,
    ResourceError,
    UserError,
)
from etude.records import Status

if TYPE_CHECKING:
    from etude.config import McpConfig

EXIT_UNFINISHED = 1
EXIT_KEPT_BACK = 4
_NUM_NAMED = 20
"""Largest number of kept-back files that the summary lists."""
_HELP = """/undo            undo the agent's changes since your last message
/diff            everything that it has changed
/status          session, model, mode
/approve MODE    preview, ask, auto-edit or full
/apply           write to the repository what a preview kept back
/quit            end (the session stays: --resume)
Ctrl-C stops the agent; again, it ends the program."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """The arguments of the command line."""

    path: Path | None
    choice: ModelChoice | None
    """None: that of the session to resume."""
    instruction: str | None
    mode: str | None
    resume: str | None
    as_json: bool
    sandbox: SandboxChoice
    max_turns: int | None = None
    servers: Mapping[str, McpConfig] = field(default_factory=dict[str, "McpConfig"])


def run_agent(request: AgentRequest) -> int:
    """Runs the agent; returns the exit code. Raises EtudeError if a single instruction fails."""
    with asyncio.Runner() as runner:
        program = _AgentProgram(request, runner)
        try:
            return program.run()
        finally:
            runner.run(program.close())


class _AgentProgram:
    """One invocation of the command. The event loop does not run while the user types at the prompt."""

    def __init__(self, request: AgentRequest, runner: asyncio.Runner) -> None:
        self._request = request
        self._runner = runner
        self._stack = contextlib.AsyncExitStack()
        self._lines = Lines()
        self._output, self._notes = standard_output(), standard_error()
        self._terminal = TerminalFace(self._output.console(), self._notes.console())
        self._user = TerminalUser(self._terminal, self._lines)

    def run(self) -> int:
        self._check_instruction()
        if self._request.resume is None:
            self._check_input()
        conversation = self._runner.run(self._open())
        # The agent stops as by Ctrl-C: its changes stay, and the session can be resumed.
        self._output.on_reader_gone = conversation.stop
        if not conversation.is_open:
            self._check_input()
        code = self._dispatch(conversation)
        if self._output.error is not None:
            raise ResourceError(
                "cannot be written; the session is kept, and can be resumed",
                field="standard output",
                received=str(self._output.error),
                fix="free disk space, or redirect the output",
            ) from self._output.error
        return EXIT_CLOSED_PIPE if self._output.reader_gone else code

    def _dispatch(self, conversation: Conversation) -> int:
        if self._request.instruction is not None:
            return self._run_instruction(conversation, self._request.instruction)
        if conversation.is_open:
            self._print_note("continuing where the session was interrupted")
            self._turn(conversation, conversation.resume())
        return self._converse(conversation)

    def _check_instruction(self) -> None:
        """Raises ConfigError for an empty instruction, and for `--json` without one at a terminal."""
        request = self._request
        if request.instruction is not None and not request.instruction.strip():
            raise ConfigError(
                "is empty", field="-p", received=request.instruction, fix="write what the agent is to do"
            )
        if request.as_json and request.instruction is None and self._lines.is_terminal:
            raise ConfigError(
                "needs -p, since standard input is a terminal", field="--json", fix='add -p "INSTRUCTION"'
            )

    def _check_input(self) -> None:
        """Raises ConfigError for `--json` without any instruction."""
        if not self._request.as_json or self._request.instruction is not None:
            return
        if not self._runner.run(self._lines.has_words()):
            raise ConfigError(
                "no instruction was given, and standard input is empty",
                field="--json",
                fix='add -p "INSTRUCTION", or send it as a line on standard input',
            )

    async def close(self) -> None:
        self._terminal.hide_running()
        await self._stack.aclose()

    async def _open(self) -> Conversation:
        request, enter = self._request, self._stack.enter_async_context
        root = sessions_directory()
        folder = None if request.resume is None else SessionFolder.open(root, request.resume)
        path = request.path
        if folder is not None:
            path = folder.directory(path)
        tree = DirectoryTree(path or Path())
        choice = request.choice or ModelChoice.from_dict(folder.meta.model if folder else {})
        sandbox = request.sandbox if folder is None else _sandbox_of_session(request.sandbox, folder.meta)
        choice = choice.in_place() if sandbox.in_place else choice
        policy = await enter(open_policy(choice, request.instruction is not None, request.servers))
        backend, around = await open_surroundings(sandbox, tree.root, self._print_note_unless_json)
        self._stack.push_async_callback(backend.close)
        if folder is None:
            asks = request.instruction is None or sandbox.in_place
            mode = request.mode or ("ask" if asks else "preview")
            folder = SessionFolder.create(root, tree.root, choice.to_dict(), mode, sandbox.in_place)
        elif request.choice is not None:
            folder.update(model=choice.to_dict())
        face = Frontend(self._emit, self._user.allow, self._user)
        mode = request.mode or folder.meta.mode
        opening = open_conversation(folder, tree, policy, backend, face, mode, around, request.max_turns)
        conversation = await enter(opening)
        if not request.as_json:
            self._print_note(f"{policy.label} · {tree.root} · {mode}: {MODE_HELP[mode]}")
            self._print_note(f"session {conversation.id}")
        return conversation

    def _emit(self, event: AgentEvent) -> None:
        if self._request.as_json:
            self._output.print_line(event_document(event))
        else:
            self._terminal.emit(event)

    # ---- one instruction ------------------------------------------------------------------------

    def _run_instruction(self, conversation: Conversation, instruction: str) -> int:
        outcome = self._run(conversation, conversation.say(instruction))
        unanswered = self._user.num_unanswered
        files, kept_back = conversation.changes(), conversation.mirror.kept_back
        if self._request.as_json:
            self._output.print_line(
                {
                    "event": "result",
                    "session": conversation.id,
                    "status": outcome.status.value,
                    "cause": outcome.cause,
                    "turns": conversation.num_turns,
                    "written": conversation.mode != "preview",
                    "files": [file.path for file in files],
                    "kept_back": kept_back,
                    "refused": unanswered,
                    "diff": diff_text(files),
                }
            )
        else:
            self._terminal.print_status(outcome.status, outcome.cause)
            num_files = len([file for file in files if file.path not in kept_back])
            self._print_summary(num_files, kept_back, conversation.mode != "preview")
        if unanswered:
            self._print_note(
                f"{unanswered} call{'s' * (unanswered != 1)} refused for lack of an answer; --approve "
                "auto-edit allows edits, --approve full commands as well"
            )
        if outcome.cause == STOPPED_BY_USER:
            return EXIT_INTERRUPTED
        if outcome.status is not Status.DONE:
            return EXIT_UNFINISHED
        return EXIT_KEPT_BACK if kept_back or unanswered else 0

    def _print_summary(self, num_files: int, kept_back: Mapping[str, str], written: bool) -> None:
        if num_files and written:
            self._print_note(f"{num_files} file{'s' if num_files > 1 else ''} changed")
        elif num_files:
            self._print_note("nothing was written; --apply writes such changes")
        elif not kept_back:
            self._print_note("the agent changed no file")
        for path, why in list(kept_back.items())[:_NUM_NAMED]:
            self._print_note(f"kept back: {'all changes' if path == EVERYTHING else path}: {why}")
        if len(kept_back) > _NUM_NAMED:
            self._print_note(f"kept back: {len(kept_back) - _NUM_NAMED} more")

    # ---- a conversation -------------------------------------------------------------------------

    def _converse(self, conversation: Conversation) -> int:
        if not self._request.as_json:
            self._print_note("/help lists commands")
        while not self._output.reader_gone and (said := self._next_words()) is not None:
            words = said.strip()
            if words in ("/quit", "/exit"):
                break
            try:
                if words.startswith("/"):
                    self._command(conversation, *words.split(maxsplit=1))
                elif words:
                    self._turn(conversation, conversation.say(words))
            except (UserError, AgentError) as error:
                print_error(error)
        return 0

    def _next_words(self) -> str | None:
        if self._lines.is_terminal:
            try:
                return self._lines.prompt("\n> ")
            except BrokenPipeError as error:
                self._output.stop_writing(error)
                return None
        return self._runner.run(self._lines.read())

    def _turn(self, conversation: Conversation, saying: Coroutine[Any, Any, Outcome]) -> None:
        try:
            outcome = self._run(conversation, saying)
        except InfrastructureError as error:
            print_error(error)
            return
        if not self._request.as_json:
            self._terminal.print_status(outcome.status, outcome.cause)

    def _command(self, conversation: Conversation, name: str, argument: str = "") -> None:
        match name:
            case "/undo":
                undone = self._runner.run(conversation.undo())
                if undone is None:
                    self._print_note("there is nothing to undo")
                else:
                    self._emit(undone)
            case "/diff":
                self._terminal.show_diff(diff_text(conversation.changes()))
            case "/status":
                self._print_note(
                    f"session {conversation.id} · {conversation.policy.label} · {conversation.tree.root}"
                )
                turns, files = conversation.num_turns, len(conversation.changes())
                self._print_note(f"{conversation.mode} · {turns} messages · {files} files changed")
            case "/approve":
                conversation.set_mode(argument.strip())
                self._print_note(MODE_HELP[conversation.mode])
            case "/apply":
                self._emit(self._runner.run(conversation.write_back()))
            case "/help":
                self._print_note(_HELP)
            case _:
                raise UserError("no such command", field=name[:40], fix="type /help to list them")

    # ---- both -----------------------------------------------------------------------------------

    def _run(self, conversation: Conversation, saying: Coroutine[Any, Any, Outcome]) -> Outcome:
        try:
            return self._runner.run(_interruptible(conversation, saying))
        finally:
            self._terminal.hide_running()
            self._terminal.end_line()

    def _print_note_unless_json(self, text: str) -> None:
        if not self._request.as_json:
            self._print_note(text)

    def _print_note(self, text: str) -> None:
        self._notes.console().print(shown(text), style="dim", soft_wrap=True)


def _sandbox_of_session(sandbox: SandboxChoice, meta: SessionMeta) -> SandboxChoice:
    """The sandbox of a resumed session, in place or on a copy as before. Raises ConfigError."""
    if sandbox.in_place and not meta.in_place:
        raise ConfigError(
            "the session works on a copy of the directory",
            field="--in-place",
            received=meta.id,
            fix="leave it out, or begin a new session without --resume",
        )
    return replace(sandbox, in_place=meta.in_place)


async def _interruptible(conversation: Conversation, saying: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Runs a turn; Ctrl-C stops the agent, and a second one raises KeyboardInterrupt."""
    task, loop, presses = asyncio.ensure_future(saying), asyncio.get_running_loop(), itertools.count(1)

    def on_interrupt() -> None:
        if next(presses) > 1 or not conversation.stop():
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        if task.cancelled():
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def print_failure(error: EtudeError) -> None:
    """Prints the last line of `--json` for an agent that failed."""
    kind = type(error).__name__
    document = {"event": "result", "status": "error", "error": kind, "message": str(error)}
    standard_output().print_line(document)
