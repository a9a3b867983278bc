"""The terminal interface of the agent: streamed text, calls, coloured diffs, questions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from etude.cli.agent_calls import call_preview, call_title
from etude.cli.agent_input import Lines
from etude.cli.output import print_diff, shown
from etude.controller.agent.approval import Answer
from etude.controller.agent.events import (
    AgentEvent,
    AgentText,
    CallsRequested,
    FilesChanged,
    MessageEnded,
    Notice,
    RunEnded,
    ToolCallEnded,
    ToolCallStarted,
)
from etude.errors import UserAbortedError
from etude.records import Status, ToolCall

_OUTPUT_LINES = 3
_ANSWERS: dict[str, Answer] = {
    "y": "once",
    "yes": "once",
    "a": "always",
    "always": "always",
    "n": "no",
    "no": "no",
}


class TerminalFace:
    """Shows events on a console; as plain lines if it is not a terminal."""

    def __init__(self, console: Console, questions: Console) -> None:
        """`console`: for the agent's events; `questions`: for questions to the user."""
        self._console = console
        self.questions = questions
        self._running: dict[int, str] = {}
        self._live: Live | None = None
        self._open_line = False
        self._deferred: list[AgentEvent] | None = None
        """Events deferred while a question waits for an answer; None if there is no question."""

    def emit(self, event: AgentEvent) -> None:
        """Shows one event; during a question, after it has been answered."""
        if self._deferred is not None:
            self._deferred.append(event)
            return
        match event:
            case AgentText():
                self._print_words(event)
            case MessageEnded():
                self.end_line()
            case CallsRequested():
                self._running.clear()  # calls of a stopped turn have no end event
                self.end_line()
            case ToolCallStarted():
                self._running[event.position] = call_title(event.call)
                self._refresh()
            case ToolCallEnded():
                self._running.pop(event.position, None)
                self._refresh()
                self._call_done(event)
            case FilesChanged():
                self.end_line()
                for file in event.files:
                    self.show_diff(file.diff())
                for path, why in event.kept_back.items():
                    self._console.print(shown(f"not written: {path}: {why}", "bold yellow"))
            case Notice():
                self.end_line()
                self._console.print(shown(event.text, "yellow"))
            case RunEnded():
                self.hide_running()
                self.end_line()

    def end_line(self) -> None:
        """Ends the line of text that is being written."""
        if self._open_line:
            self._console.print()
            self._open_line = False

    @contextlib.contextmanager
    def question(self) -> Iterator[None]:
        """Defers events while the user is asked, so that nothing else is written on the question's line."""
        self.hide_running()
        self.end_line()
        self._deferred = []
        try:
            yield
        finally:
            deferred, self._deferred = self._deferred, None
            for event in deferred:
                self.emit(event)

    def hide_running(self) -> None:
        """Removes the list of running calls from the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show_diff(self, diff: str) -> None:
        """Prints a unified diff in colour."""
        print_diff(self._console, diff.splitlines())

    def show_call(self, call: ToolCall) -> None:
        """Prints a call that needs approval, and a preview of its effect."""
        self.questions.print(shown(call_title(call), "bold"))
        print_diff(self.questions, call_preview(call), "  ")

    def print_status(self, status: Status, cause: str) -> None:
        """Prints why the agent stopped, unless it finished."""
        if status is not Status.DONE:
            self._console.print(shown(f"stopped: {cause or status.value}", "yellow"))

    def _print_words(self, event: AgentText) -> None:
        self.hide_running()
        style = "" if event.kind == "text" else "dim italic"
        self._console.print(shown(event.text, style), end="", soft_wrap=True)
        self._open_line = not event.text.endswith("\n")

    def _call_done(self, event: ToolCallEnded) -> None:
        failed = event.result.error is not None or event.result.facts.get("green") is False
        mark = Text("✗ " if failed else "✓ ", style="red" if failed else "green")
        self._console.print(mark + shown(call_title(event.call)), soft_wrap=True)
        lines = event.result.output.splitlines()
        for line in lines[:_OUTPUT_LINES]:
            self._console.print(shown(f"  {line[:200]}", "dim"), soft_wrap=True)
        if len(lines) > _OUTPUT_LINES:
            self._console.print(Text(f"  ... {len(lines) - _OUTPUT_LINES} lines more", style="dim"))

    def _refresh(self) -> None:
        """Updates the list of running calls, on a terminal."""
        if not self._console.is_terminal:
            return
        if not self._running:
            self.hide_running()
            return
        rows = Group(*(Spinner("dots", shown(title)) for title in self._running.values()))
        if self._live is None:
            self._live = Live(rows, console=self._console, transient=True)
            self._live.start()
        else:
            self._live.update(rows)


class TerminalUser:
    """Asks the user at the terminal: implements the agent's `User`, and approval of calls."""

    def __init__(self, face: TerminalFace, lines: Lines) -> None:
        self._face = face
        self._lines = lines
        self._asking = asyncio.Lock()
        self.num_unanswered = 0
        """Number of calls that were refused because the input had ended."""

    async def allow(self, call: ToolCall) -> Answer:
        """Whether the call may run."""
        async with self._asking:
            with self._face.question():
                self._face.show_call(call)
                while (said := await self._ask("allow? [y]es, [n]o, [a]lways ")) is not None:
                    if answer := _ANSWERS.get(said.strip().lower()):
                        return answer
        self.num_unanswered += 1
        return "no"

    async def answer(self, question: str, options: Sequence[str] = ()) -> str:
        """See User. A number chooses an option. Raises UserAbortedError at the end of input."""
        async with self._asking:
            with self._face.question():
                console = self._face.questions
                console.print(shown(question, "bold"))
                for number, option in enumerate(options, 1):
                    console.print(shown(f"  {number}. {option}"))
                said = await self._ask("> ")
        if said is None:
            raise UserAbortedError("the user gave no answer")
        said = said.strip()
        if said.isdecimal() and 0 < int(said) <= len(options):
            return options[int(said) - 1]
        return said

    async def _ask(self, prompt: str) -> str | None:
        console, said = self._face.questions, None
        console.print(Text(prompt), end="", soft_wrap=True)
        try:
            said = await self._lines.read()
        finally:
            if said is None:  # no newline was typed
                console.print()
        return said
