"""`etude agent --acp`: the agent in an editor, by the Agent Client Protocol over stdin and stdout.

    editor <-- session/update, permissions, files --> [ EditorAgent ] --> one Conversation for each session

Updates are sent in the order of events. A prompt is answered when all of its updates have been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import select
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from acp import PROTOCOL_VERSION, Client, RequestError, run_agent, update_agent_message_text
from acp.schema import (
    AgentCapabilities,
    AllowedOutcome,
    AvailableCommand,
    AvailableCommandsUpdate,
    ClientCapabilities,
    Implementation,
    InitializeResponse,
    ListSessionsResponse,
    LoadSessionResponse,
    McpServerStdio,
    NewSessionResponse,
    PermissionOption,
    PromptCapabilities,
    PromptResponse,
    SessionCapabilities,
    SessionInfo,
    SessionListCapabilities,
    SessionMode,
    SessionModeState,
    SetSessionModeResponse,
)

import etude
from etude.agent import agent_registry
from etude.agent.mcp.client import describe_servers
from etude.cli.agent_acp_transport import LineTransport
from etude.cli.agent_acp_tree import EditorTree
from etude.cli.agent_acp_updates import Updates, history
from etude.config import McpConfig
from etude.controller.agent.approval import MODE_HELP, MODES, Answer
from etude.controller.agent.conversation import (
    STOPPED_BY_USER,
    Conversation,
    Frontend,
    Outcome,
    open_conversation,
)
from etude.controller.agent.events import AgentEvent
from etude.controller.agent.folders import SessionFolder, list_sessions, sessions_directory
from etude.controller.agent.models import ModelChoice, Policy, open_policy
from etude.controller.agent.surroundings import SandboxChoice, Surroundings, open_surroundings
from etude.controller.agent.trees import DirectoryTree
from etude.controller.backends import open_people_backend
from etude.errors import ConfigError, EtudeError, UserAbortedError, UserError
from etude.kit.tasks import end_tasks
from etude.records import Status, ToolCall
from etude.sandbox.interface import SandboxBackend

_STOP_REASONS = {"turns": "max_turn_requests", "tokens": "max_tokens", "message": "max_tokens"}
_OPTIONS = (
    PermissionOption(option_id="once", name="Allow", kind="allow_once"),
    PermissionOption(option_id="always", name="Always allow this tool", kind="allow_always"),
    PermissionOption(option_id="no", name="Refuse", kind="reject_once"),
)
_COMMANDS = [
    AvailableCommand(name="undo", description="Undo the agent's changes since your last message"),
    AvailableCommand(name="apply", description="Write the changes that a preview kept in the sandbox"),
]


def serve(
    choice: ModelChoice,
    mode: str,
    sandbox: SandboxChoice,
    max_turns: int | None = None,
    servers: Mapping[str, McpConfig] | None = None,
) -> None:
    """Serves one editor until it closes our input. Raises UserError for a model that cannot be opened, and
    for an input that is a file."""

    async def on_stdio() -> None:
        await serve_editor(choice, mode, sandbox, await LineTransport.on_stdio(), max_turns, servers)

    with select.epoll() as polling:
        try:
            polling.register(sys.stdin.fileno(), select.EPOLLIN)
        except PermissionError as error:
            raise ConfigError(
                "standard input must be a pipe from an editor", field="--acp",
                received="standard input from a file, or /dev/null", fix="let the editor start this command",
            ) from error  # fmt: skip
    asyncio.run(on_stdio())


async def serve_editor(
    choice: ModelChoice,
    mode: str,
    sandbox: SandboxChoice,
    transport: LineTransport,
    max_turns: int | None = None,
    servers: Mapping[str, McpConfig] | None = None,
) -> None:
    """Serves the editor at the other end of `transport` until it closes it. Raises UserError."""
    open_people_backend(sandbox.backend)  # to report a backend that does not work at once
    choice = choice.in_place() if sandbox.in_place else choice
    async with contextlib.AsyncExitStack() as stack:
        policy = await stack.enter_async_context(open_policy(choice, False, servers))
        agent = EditorAgent(choice, policy, sandbox, mode, max_turns)
        stack.push_async_callback(agent.close)
        await run_agent(cast(Any, agent), transport)


@dataclass(slots=True, eq=False)
class _OpenSession:
    """An open session of the editor."""

    id: str
    client: Client
    conversation: Conversation = field(init=False)
    updates: Updates = field(init=False)
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue[Any])
    busy: bool = False

    def emit(self, event: AgentEvent) -> None:
        """Queues the updates of an event."""
        for update in self.updates.of(event):
            self.queue.put_nowait(update)

    async def send_all(self) -> None:
        """Sends queued updates, in order, until cancelled. Those for a disconnected editor are dropped."""
        while True:
            update = await self.queue.get()
            with contextlib.suppress(ConnectionError):
                await self.client.session_update(self.id, update)
            self.queue.task_done()

    async def allow(self, call: ToolCall) -> Answer:
        """Asks for permission to run a call. A cancelled request or a disconnected editor counts as no."""
        await self.queue.join()
        try:
            answer = await self.client.request_permission(
                session_id=self.id, tool_call=self.updates.permission_request(call), options=list(_OPTIONS)
            )
        except (RequestError, ConnectionError):
            return "no"
        outcome = answer.outcome
        chosen = outcome.option_id if isinstance(outcome, AllowedOutcome) else "no"
        return cast(Answer, chosen) if chosen in ("once", "always") else "no"

    async def answer(self, question: str, options: Sequence[str] = ()) -> str:
        """See User: the protocol has no free-text questions, so only those with options are asked."""
        if not options:
            raise UserAbortedError("the editor cannot ask; put the question as your last words and finish")
        await self.queue.join()
        asked = self.updates.permission_request(ToolCall("ask_user", {"question": question}))
        listed = [
            PermissionOption(option_id=str(number), name=option, kind="allow_once")
            for number, option in enumerate(options)
        ]
        try:
            answer = await self.client.request_permission(session_id=self.id, tool_call=asked, options=listed)
        except (RequestError, ConnectionError) as error:
            raise UserAbortedError("the user gave no answer") from error
        outcome = answer.outcome
        if not isinstance(outcome, AllowedOutcome) or not outcome.option_id.isdecimal():
            raise UserAbortedError("the user gave no answer")
        return options[min(int(outcome.option_id), len(options) - 1)]


class EditorAgent:
    """Implements the protocol library's `Agent`. EtudeErrors become protocol errors, with a fix."""

    def __init__(
        self,
        choice: ModelChoice,
        policy: Policy,
        sandbox: SandboxChoice,
        mode: str,
        max_turns: int | None = None,
    ) -> None:
        self._choice = choice
        self._policy = policy
        self._sandbox = sandbox
        self._mode = mode
        self._max_turns = max_turns
        self._backends: dict[tuple[Path, SandboxChoice], tuple[SandboxBackend, Surroundings]] = {}
        self._client: Client | None = None
        self._offered: ClientCapabilities | None = None
        self._sessions: dict[str, _OpenSession] = {}
        self._stack = contextlib.AsyncExitStack()

    def on_connect(self, conn: Client) -> None:
        """Called by the library when the connection is established."""
        self._client = conn

    async def close(self) -> None:
        """Closes every session's sandbox; the sessions stay on disk."""
        for session in self._sessions.values():
            session.conversation.stop()
        await self._stack.aclose()

    async def initialize(
        self, protocol_version: int, client_capabilities: ClientCapabilities | None = None, **_: Any
    ) -> InitializeResponse:
        """Negotiates the protocol version and returns our capabilities."""
        self._offered = client_capabilities
        return InitializeResponse(
            protocol_version=min(protocol_version, PROTOCOL_VERSION),
            agent_capabilities=AgentCapabilities(
                load_session=True,
                prompt_capabilities=PromptCapabilities(embedded_context=True),
                session_capabilities=SessionCapabilities(list=SessionListCapabilities()),
            ),
            agent_info=Implementation(name="etude", title="Étude", version=etude.__version__),
            auth_methods=[],
        )

    async def new_session(self, cwd: str, mcp_servers: Any = None, **_: Any) -> NewSessionResponse:
        """Creates a session on the directory `cwd`."""
        with _protocol_errors():
            disk = _directory(cwd)
            model, in_place = self._choice.to_dict(), self._sandbox.in_place
            folder = SessionFolder.create(sessions_directory(), disk.root, model, self._mode, in_place)
            session = await self._open(folder, disk, self._mode, mcp_servers)
        return NewSessionResponse(session_id=session.id, modes=_modes(session.conversation))

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: Any
    ) -> LoadSessionResponse:
        """Opens a session from disk, and sends all its messages to the editor again."""
        with _protocol_errors():
            known = self._sessions.get(session_id)
            if known is None:
                folder = SessionFolder.open(sessions_directory(), session_id)
                disk = _directory(cwd)
                folder.directory(disk.root)
                known = await self._open(folder, disk, folder.meta.mode, mcp_servers)
            for update in history(known.conversation, known.updates):
                known.queue.put_nowait(update)
            await known.queue.join()
        return LoadSessionResponse(modes=_modes(known.conversation))

    async def list_sessions(self, cwd: str | None = None, **_: Any) -> ListSessionsResponse:
        """Lists the sessions on disk, all of them on one page."""
        metas = await asyncio.to_thread(list_sessions, sessions_directory())
        return ListSessionsResponse(
            sessions=[
                SessionInfo(
                    session_id=session.id,
                    cwd=session.path,
                    title=session.title or None,
                    updated_at=datetime.fromtimestamp(session.created_s, UTC).isoformat(),
                )
                for session in metas
                if cwd is None or session.path == cwd
            ]
        )

    async def set_session_mode(self, session_id: str, mode_id: str, **_: Any) -> SetSessionModeResponse:
        """Sets how calls are approved from now on."""
        with _protocol_errors():
            self._session(session_id).conversation.set_mode(mode_id)
        return SetSessionModeResponse()

    async def prompt(self, session_id: str, prompt: Sequence[Any], **_: Any) -> PromptResponse:
        """Runs the agent on a user's message; returns when it has finished."""
        session = self._session(session_id)
        if session.busy:
            raise RequestError.invalid_request({"message": "the agent is at work; cancel it first"})
        session.busy = True
        try:
            with _protocol_errors():
                outcome = await self._carry_out(session, words_of(prompt, session.conversation.tree.root))
                await session.queue.join()
        finally:
            session.busy = False
        return PromptResponse(stop_reason=cast(Any, "end_turn" if outcome is None else _stop_reason(outcome)))

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Stops the agent in this session; unknown sessions are ignored."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.conversation.stop()

    async def _carry_out(self, session: _OpenSession, words: str) -> Outcome | None:
        conversation = session.conversation
        match words.strip():
            case "":
                raise UserError("is empty", field="prompt")
            case "/undo":
                undone = await conversation.undo()
                files = [file.path for file in undone.files] if undone else []
                text = f"undone: {', '.join(files)}" if files else "there is nothing to undo"
                for path, why in (undone.kept_back if undone else {}).items():
                    text += f"\nnot undone: {path}: {why}"
            case "/apply":
                written = await conversation.write_back()
                paths = [file.path for file in written.files if file.path not in written.kept_back]
                text = "written: " + (", ".join(paths) or "nothing")
                for path, why in written.kept_back.items():
                    text += f"\nnot written: {path}: {why}"
            case _:
                return await conversation.say(words)
        session.queue.put_nowait(update_agent_message_text(text))
        return None

    async def _policy_for(
        self, session: _OpenSession, named: Sequence[Any] | None, stack: contextlib.AsyncExitStack
    ) -> Policy:
        """The policy, with the tools of the MCP servers that the editor names for a session. Each server is
        connected separately; for one that cannot be used, the editor gets a message."""
        choice, servers = self._choice, dict(self._policy.servers)
        for server in named or ():
            try:
                name, config = _server(server)
                if choice.run:
                    raise ConfigError(
                        "a run's model can only use the tools that it was trained with",
                        field="mcpServers",
                        received=name,
                        fix="leave it out, or train with the server in [agent.mcp]",
                    )
                if name in servers:
                    raise ConfigError("another server has this name", field="mcpServers", received=name)
                more = {**servers, **await describe_servers({name: config})}
                agent_registry(choice.agent(more))
                servers = more
            except EtudeError as error:
                text = f"[the MCP server {server.name} is not connected: {error}]\n"
                session.queue.put_nowait(update_agent_message_text(text))
        if servers == self._policy.servers:
            return self._policy
        opening = open_policy(choice, False, servers, self._policy.indexes)
        return await stack.enter_async_context(opening)

    async def _open(
        self, folder: SessionFolder, disk: DirectoryTree, mode: str, named: Sequence[Any] | None = None
    ) -> _OpenSession:
        assert self._client is not None
        session = _OpenSession(folder.meta.id, self._client)
        fs = self._offered.fs if self._offered else None
        sandbox = replace(self._sandbox, in_place=folder.meta.in_place)
        # In place, the tools and the editor both use the files on disk.
        tree = disk if sandbox.in_place else EditorTree(disk.root, self._client, session.id, fs)
        face = Frontend(session.emit, session.allow, session)
        if (disk.root, sandbox) not in self._backends:
            notes: list[str] = []
            opened = await open_surroundings(sandbox, disk.root, notes.append)
            self._backends[disk.root, sandbox] = opened
            self._stack.push_async_callback(opened[0].close)
            for text in notes:
                session.queue.put_nowait(update_agent_message_text(f"[{text}]\n"))
        backend, around = self._backends[disk.root, sandbox]
        async with contextlib.AsyncExitStack() as opened:  # cleans up after a session that cannot be opened
            policy = await self._policy_for(session, named, opened)
            opening = open_conversation(folder, tree, policy, backend, face, mode, around, self._max_turns)
            session.conversation = conversation = await opened.enter_async_context(opening)
            session.updates = Updates(disk.root, lambda: conversation.state.todos)
            opened.push_async_callback(end_tasks, asyncio.create_task(session.send_all()))
            await self._stack.enter_async_context(opened.pop_all())
        self._sessions[session.id] = session
        commands = AvailableCommandsUpdate(
            session_update="available_commands_update", available_commands=_COMMANDS
        )
        session.queue.put_nowait(commands)
        return session

    def _session(self, session_id: str) -> _OpenSession:
        """An open session by its id. Raises RequestError for a session that is not open."""
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestError.resource_not_found(session_id)
        return session


def _server(named: Any) -> tuple[str, McpConfig]:
    """Name and configuration of an MCP server that an editor names. Raises ConfigError unless it is a
    command."""
    name = re.sub(r"[^a-z0-9]+", "_", named.name.lower()).strip("_")
    if not isinstance(named, McpServerStdio) or not named.command or not re.match("[a-z]", name):
        raise ConfigError(
            "only servers started by a command, with a name that begins with a letter, can be connected",
            field="mcpServers",
            received=named.name,
            fix="name a command that speaks MCP on standard input and output",
        )
    env = {variable.name: variable.value for variable in named.env}
    return name, McpConfig(command=shlex.join([named.command, *named.args]), where="host", env=env)


def words_of(blocks: Sequence[Any], root: Path) -> str:
    """The text of a prompt's blocks. Raises ConfigError for images and audio, which are not supported."""
    parts: list[str] = []
    for block in blocks:
        match block.type:
            case "text":
                parts.append(block.text)
            case "resource_link":
                parts.append(f"@{_named(block.uri, root)}")
            case "resource" if hasattr(block.resource, "text"):
                parts.append(f"\n{_named(block.resource.uri, root)}:\n```\n{block.resource.text}\n```\n")
            case kind:
                raise ConfigError(
                    "is content that the agent cannot read", field="prompt", received=kind, fix="send text"
                )
    return "".join(parts)


def _named(uri: str, root: Path) -> str:
    """Name of a resource for the agent: for a file of the directory, its relative path."""
    path = unquote(uri.removeprefix("file://"))
    return path.removeprefix(f"{root}/")


@contextlib.contextmanager
def _protocol_errors() -> Iterator[None]:
    """Turns EtudeErrors into protocol errors; a UserError is one of invalid parameters."""
    try:
        yield
    except EtudeError as error:
        data = {
            "error": type(error).__name__,
            "message": error.message,
            "field": error.field,
            "received": None if error.received is None else str(error.received),
            "fix": error.fix,
        }
        code = -32602 if isinstance(error, UserError) else -32603
        raise RequestError(code, str(error), data) from error


def _directory(cwd: str) -> DirectoryTree:
    if not Path(cwd).is_absolute():
        raise ConfigError(
            "must be an absolute path", field="cwd", received=cwd, fix="give the path from the root directory"
        )
    return DirectoryTree(Path(cwd))


def _modes(conversation: Conversation) -> SessionModeState:
    in_place = conversation.surroundings.in_place
    listed = [
        SessionMode(id=mode, name=mode.capitalize(), description=MODE_HELP[mode])
        for mode in MODES
        if not (in_place and mode == "preview")
    ]
    return SessionModeState(current_mode_id=conversation.mode, available_modes=listed)


def _stop_reason(outcome: Outcome) -> str:
    if outcome.cause == STOPPED_BY_USER:
        return "cancelled"
    return "end_turn" if outcome.status is Status.DONE else _STOP_REASONS.get(outcome.cause, "end_turn")
