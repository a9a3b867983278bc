"""A session between a person and the agent: instructions in, events out, all state durably on disk.

    say(words) --> [ the tree's changes go into the sandbox ] --> run_session --> [ changes come out ] --> end
                      stop() ends it between two steps; the session can be continued

After a kill -9 the sandbox is lost, but the rest is on disk: the tree, each turn's changes, the journal. An
unfinished turn runs again from its start, in a sandbox with the state before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from etude.agent import AgentSession, JournaledSession, ToolContext, run_session
from etude.agent.index.directory import DirectorySearch
from etude.agent.index.workspace import WorkspaceSearch
from etude.agent.mcp import open_servers
from etude.agent.tools.ports import User
from etude.agent.tools.state import ToolState
from etude.controller.agent.approval import Approver, Ask, Mode, checked_mode
from etude.controller.agent.changes import FileChange, combined
from etude.controller.agent.events import FilesChanged, Notice, OnAgentEvent
from etude.controller.agent.folders import SessionFolder
from etude.controller.agent.in_place import NOT_UNDONE, InPlace
from etude.controller.agent.mirror import Mirror
from etude.controller.agent.models import Policy
from etude.controller.agent.narrating import Narrator
from etude.controller.agent.surroundings import Surroundings
from etude.controller.agent.trees import DirectoryTree
from etude.controller.agent.workspace import MirroredWorkspace
from etude.errors import InfrastructureError, ResourceError
from etude.observe.machine import total_memory_bytes
from etude.protocols import Sampler
from etude.records import Status, ToolCall, ToolResult, TrajectoryId
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude.tokens import Piece

if TYPE_CHECKING:
    from etude.agent.mcp.client import SessionServers  # an extra

STOPPED_BY_USER = "user"
PROJECT_WORDS = "AGENTS.md"
MAX_PROJECT_WORDS_BYTES = 16 << 10
"""Limit of that file; the rest is left out."""
MEMORY_BYTES = 4 << 30
"""Memory of a sandbox; less on a machine with less than twice as much."""
RESOURCES = Resources(
    memory_bytes=min(MEMORY_BYTES, total_memory_bytes() // 2),
    num_processes=512,
    disk_bytes=2 << 30,
    file_bytes=256 << 20,
    cpu_s=3600,
    open_files=1024,
)
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the agent ended."""

    status: Status
    cause: str


@dataclass(frozen=True, slots=True)
class Frontend:
    """The front end of a conversation: receives its events and answers its questions."""

    emit: OnAgentEvent
    ask: Ask | None = None
    user: User | None = None


@dataclass(slots=True, eq=False)
class Conversation:
    """Use `open_conversation`. One `say` at a time."""

    folder: SessionFolder
    tree: DirectoryTree
    policy: Policy
    backend: SandboxBackend
    face: Frontend
    approver: Approver
    mirror: Mirror
    surroundings: Surroundings = field(default_factory=Surroundings)
    max_turns: int | None = None
    """Limit of the agent's messages for one instruction."""
    state: ToolState = field(default_factory=ToolState)
    journal: JournaledSession | None = None
    sampler: Sampler | None = None
    narrator: Narrator = field(init=False)
    _workspace: MirroredWorkspace | None = None
    _search: WorkspaceSearch | DirectorySearch | None = None
    _servers: SessionServers | None = None
    _running: asyncio.Task[object] | None = None
    _runs: int = 0
    """Number of runs in this process: makes request ids unique, even after a run without messages."""
    _first_turn: int = 0
    """Number of the agent's messages before the current instruction."""
    _busy: bool = False
    _stopping: bool = False
    _undone: list[str] = field(default_factory=list[str])
    """Paths with undone changes that the agent does not know of yet."""
    redo: dict[int, tuple[ToolResult, ...]] = field(default_factory=dict[int, "tuple[ToolResult, ...]"])
    """Results, by turn, of calls that ran before a crash and whose changes are kept."""

    def __post_init__(self) -> None:
        self.narrator = Narrator(self.policy.renderer, self.face.emit)

    @property
    def id(self) -> str:
        """Id of the session."""
        return self.folder.meta.id

    @property
    def num_turns(self) -> int:
        """Messages of the agent so far."""
        return len(self.journal.session.turns) if self.journal else 0

    @property
    def mode(self) -> Mode:
        """How calls are approved."""
        return self.approver.mode

    def set_mode(self, name: str) -> None:
        """Chooses another mode. Raises ConfigError."""
        self.approver.mode = checked_mode(name, self.surroundings.in_place)
        self.mirror.writes = self.approver.mode != "preview"
        self.folder.update(mode=name)

    def changes(self) -> tuple[FileChange, ...]:
        """All changes of the agent in this session, combined."""
        return combined(self.folder.changes())

    async def say(self, text: str) -> Outcome:
        """Gives the agent an instruction, and runs it until it ends.

        Raises UserError and InfrastructureError; the session can then be continued.
        """
        with self._mark_busy():
            words = self._with_undone(text)
            workspace = await self._ready()
            if self.journal is None:
                session = self._new_session(words)
                self.journal = JournaledSession.create(self.folder.journal, session, self.state)
            else:
                self._end_open(STOPPED_BY_USER)
                self.journal.on_user(words)
            self._undone.clear()
            self._first_turn = self.num_turns
            self.folder.add_prompt(text, self.num_turns)
            return await self._run(workspace)

    @property
    def is_open(self) -> bool:
        """Whether the agent was running when the session was last left: `resume` continues it."""
        return self.journal is not None and self.journal.session.status is None

    async def resume(self) -> Outcome:
        """Continues a run that a crash interrupted. Raises as `say`."""
        assert self.is_open, "nothing was interrupted"
        with self._mark_busy():
            return await self._run(await self._ready())

    def stop(self) -> bool:
        """Stops the agent; `say` then returns. False if it is not running."""
        if not self._busy:
            return False
        self._stopping = True
        if self._running is not None:
            self._running.cancel()
        return True

    async def undo(self) -> FilesChanged | None:
        """Undoes the agent's changes of the last instruction not undone yet; None if there are none."""
        if self.surroundings.in_place:
            self.face.emit(Notice(NOT_UNDONE))
        changes = [change for change in self.folder.changes() if not change.undone and combined([change])]
        if not changes:
            return None
        await self._ready()
        last = [change for change in changes if change.prompt == changes[-1].prompt]
        files = combined(last)
        kept_back = await self.mirror.undo(files)
        for change in last:
            self.folder.save_change(replace(change, undone=True))
        self._undone += [file.path for file in files if file.path not in kept_back]
        swapped = tuple(
            FileChange(file.path, file.after, file.before) for file in files if file.path not in kept_back
        )
        return FilesChanged(last[-1].turn, swapped, self.mirror.writes, kept_back)

    async def write_back(self) -> FilesChanged:
        """Writes the changes of a preview, which are only in the sandbox, to the tree."""
        files = tuple(
            FileChange(path, self.mirror.disk.get(path), self.mirror.box.get(path))
            for path in sorted(self.mirror.box.keys() | self.mirror.disk.keys())
            if self.mirror.box.get(path) != self.mirror.disk.get(path)
        )
        kept_back = {
            file.path: why for file in files if (why := await self.mirror.write(file.path, file.after))
        }
        return FilesChanged(self.num_turns, files, True, kept_back)

    async def close(self) -> None:
        """Ends the sandbox; the session stays on disk. Idempotent."""
        self.stop()
        if self._running is not None:
            await asyncio.wait([self._running], timeout=_STOP_S)
        await self._drop_sandbox()
        if self.journal is not None:
            self.journal.close()

    @contextlib.contextmanager
    def _mark_busy(self) -> Iterator[None]:
        assert not self._busy, "the agent is at work"
        self._busy, self._stopping = True, False
        try:
            yield
        finally:
            self._busy = False

    # ---- one run --------------------------------------------------------------------------------

    async def _run(self, workspace: MirroredWorkspace) -> Outcome:
        journal = self.journal
        assert journal is not None
        sampler = self._sampler()
        self._runs += 1
        journal.max_turns = None if self.max_turns is None else self._first_turn + self.max_turns
        task = self._running = asyncio.create_task(
            run_session(
                journal,
                sampler,
                workspace,
                f"{self.id}:{self._runs}",
                (self.policy.seed,),
                retry_policy=self.policy.retry_policy,
                listener=self.narrator.listen,
                # In place, calls that ran must not run again.
                log=journal
                if self.surroundings.in_place
                else _RerunLog(journal, self.redo, lambda: self.num_turns),
            )
        )
        if self._stopping:
            task.cancel()
        try:
            await asyncio.wait([task])
            await self._finish_run(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task], timeout=_STOP_S)
            self._end_open(STOPPED_BY_USER)
            raise
        finally:
            self._running = None
        session = journal.session
        assert session.status is not None
        return Outcome(session.status, session.cause)

    async def _finish_run(self, task: asyncio.Task[object]) -> None:
        """Makes the session consistent, however the run ended. Raises what the run raised."""
        assert self.journal is not None and self._workspace is not None
        if task.cancelled():
            self._end_open(STOPPED_BY_USER)
            await self._workspace.finish_turn(self.num_turns, None)
            return
        error = task.exception()
        if error is not None:
            self._end_open(f"{type(error).__name__}: {error}", Status.INFRASTRUCTURE)
            await self._drop_sandbox()
            raise error
        if self.journal.session.status is Status.AGENT_ERROR:
            await self._drop_sandbox()

    def _end_open(self, cause: str, status: Status = Status.LIMIT) -> None:
        assert self.journal is not None
        if self.journal.session.status is None:
            self.journal.stop(status, cause)

    def _new_session(self, words: str) -> AgentSession:
        policy = self.policy
        return AgentSession(
            words,
            policy.renderer,
            TrajectoryId("agent", self.id, 0, 0, 0),
            policy.limits,
            policy.params,
            self._system(),
            policy.summary,
        )

    def _system(self) -> str | tuple[Piece, ...] | None:
        """The system message, with the project's AGENTS.md."""
        policy, data = self.policy, self.mirror.content(PROJECT_WORDS)
        if policy.system_with is None or not data.strip():
            return policy.system
        most = min(MAX_PROJECT_WORDS_BYTES, policy.limits.max_tokens // 4)
        if len(data) > most:
            self.face.emit(Notice(f"only the first {most} bytes of {PROJECT_WORDS} are read"))
        text = data[:most].decode(errors="replace").strip()
        return policy.system_with(f"\n\nThe project says to agents, in {PROJECT_WORDS}:\n\n{text}")

    def _sampler(self) -> Sampler:
        if self.sampler is None:
            make = self.policy.sampler_for
            self.sampler = make(self.narrator.preview, self.num_turns) if make else self.policy.sampler
        return self.sampler

    def _with_undone(self, text: str) -> str:
        if not self._undone:
            return text
        return f"(I have undone your changes to {', '.join(sorted(set(self._undone)))}.)\n\n{text}"

    # ---- the sandbox ----------------------------------------------------------------------------

    async def _ready(self) -> MirroredWorkspace:
        """The workspace: makes its sandbox if there is none, and copies the tree's changes into it."""
        if self._workspace is not None:
            await self.mirror.pull()
            if self._search is not None:
                self._search.changed_somewhere()
            return self._workspace
        if not self.mirror.box and not self.mirror.disk:
            await self.mirror.load()
            self._report_left_out()
        else:
            await self.mirror.pull()
        around = self.surroundings
        template = self.mirror.make_template(around.files, around.image)
        sandbox = await self.backend.create(template, RESOURCES, around.network)
        self.mirror.mount(sandbox)
        if around.in_place:
            with contextlib.suppress(ResourceError):  # without ripgrep the sandbox searches by itself
                self._search = DirectorySearch(sandbox, self.tree.root, template.passed_over)
        elif self.policy.indexes is not None:
            self._search = self.policy.indexes.search(
                template, sandbox, lambda: self.backend.create(template, RESOURCES, around.network)
            )
        self._servers = open_servers(self.policy.servers, sandbox)
        if self._servers is not None:
            try:
                await self._servers.start()
            except BaseException:
                await self._drop_sandbox()
                raise
        if not self.folder.meta.test_paths:
            self.folder.update(test_paths=self.mirror.test_paths())
        self._workspace = MirroredWorkspace(
            self._context(sandbox, template), self.mirror, self.folder, self.face.emit, lambda: self.num_turns
        )
        return self._workspace

    def _context(self, sandbox: Sandbox, template: Template) -> ToolContext:
        before = {file.path: file.before for file in self.changes()}
        return ToolContext(
            sandbox,
            self.policy.registry,
            self.folder.meta.test_paths,
            self.policy.tool_limits,
            self.state,
            self._search,
            user=self.face.user,
            servers=self._servers,
            approve=self.approver,
            workspace=template.workspace,
            has_environment=self.surroundings.has_environment,
            originals=self.mirror.originals(before),
        )

    def _report_left_out(self) -> None:
        left_out = self.tree.left_out
        if left_out:
            names = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
            self.face.emit(Notice(f"too large for the sandbox, left out: {names}"))

    async def _drop_sandbox(self) -> None:
        self._workspace = None
        search, self._search = self._search, None
        servers, self._servers = self._servers, None
        if search is not None:
            search.close()
        if servers is not None:
            await servers.close()
        sandbox, self.mirror.sandbox = self.mirror.sandbox, None
        if sandbox is not None:
            with contextlib.suppress(InfrastructureError):
                await sandbox.kill()


@dataclass(slots=True)
class _RerunLog:
    """Implements CallLog. After a crash, calls run again in a new sandbox unless their changes were saved."""

    journal: JournaledSession
    redo: Mapping[int, tuple[ToolResult, ...]]
    turn: Callable[[], int]

    def record_calls(self, calls: tuple[ToolCall, ...]) -> Mapping[int, ToolResult]:
        self.journal.record_calls(calls)
        results = self.redo.get(self.turn(), ())
        return dict(enumerate(results)) if len(results) == len(calls) else {}

    def record_result(self, position: int, result: ToolResult) -> None:
        self.journal.record_result(position, result)


@contextlib.asynccontextmanager
async def open_conversation(
    folder: SessionFolder,
    tree: DirectoryTree,
    policy: Policy,
    backend: SandboxBackend,
    face: Frontend,
    mode: str,
    surroundings: Surroundings | None = None,
    max_turns: int | None = None,
) -> AsyncIterator[Conversation]:
    """Opens a new session, or continues one that has a journal. `max_turns`: limit of the agent's messages
    for one instruction.

    Raises StoreError for a journal that is damaged or in use, ConfigError for one of another tokenizer.
    """
    around = surroundings or Surroundings()
    checked = checked_mode(mode, around.in_place)
    can = backend.capabilities()
    approver = Approver(checked, policy.registry, face.ask, can.isolation != "none" or not can.commands)
    mirror = (InPlace if around.in_place else Mirror)(tree, checked != "preview")
    conversation = Conversation(folder, tree, policy, backend, face, approver, mirror, around, max_turns)
    try:
        if folder.journal.exists():
            conversation.journal = JournaledSession.resume(folder.journal, policy.renderer, policy.registry)
            conversation.state = conversation.journal.state
            await _restore(conversation)
        yield conversation
    finally:
        await asyncio.shield(conversation.close())


async def _restore(conversation: Conversation) -> None:
    """Restores tree and sandbox to the session's state: writes pending changes, and puts previewed ones into
    the sandbox. Files that were changed since stay as they are."""
    mirror = conversation.mirror
    await mirror.load()
    recorded = conversation.folder.changes()
    for change in recorded:
        if not change.undone:
            await mirror.roll_forward(change)
    last = recorded[-1] if recorded else None
    if last is not None and (half := [file.path for file in last.files if file.before == file.after]):
        kept = conversation.folder.path / "changes" / f"{last.number:04d}.json"
        words = f"the program stopped while it changed {', '.join(half)}: the old contents are in {kept}"
        conversation.face.emit(Notice(words))
    if conversation.is_open and last is not None and last.turn == conversation.num_turns and last.results:
        conversation.redo[last.turn] = last.results
