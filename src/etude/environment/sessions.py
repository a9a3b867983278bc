"""The environment's side of a session: a sandbox with tools, the task, and grading.

Sampling is done by the caller: `run_session` in this process (a rollout, the terminal) or a client of the
environment server. All of them use this class, so they get the same results.

    open --turns--> ... --submit--> graded          pause <-> resume in between
      \\--fork(n, turn)--> n sessions of their own   close: at any time, and at the end

Operations are serialised: turns, pauses, forks, diffs and grading wait for each other. After `submit` no turn
or fork is accepted, so that a verdict cannot be used to search for a better one.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Literal

from etude.agent import SessionFacts, ToolContext
from etude.agent.index.workspace import WorkspaceSearch
from etude.agent.mcp import open_servers
from etude.agent.tools.ports import User
from etude.agent.tools.state import HARNESS_DIRECTORY, ToolState
from etude.environment.forking import Snapshots, fork_at, fork_here
from etude.environment.grading import Outcome, Verdict
from etude.environment.history import Difference, History, SessionTurn, StepEnded
from etude.environment.origins import DeferredSandbox, Origin, task_origin, user_of
from etude.environment.rewards import Evidence, compute_reward
from etude.environment.running import RunningTurn, ToolTime, TurnRunner
from etude.environment.steps import StepRun
from etude.environment.verdicts import SessionServices
from etude.errors import AgentError, ConfigError, InfrastructureError, SandboxError
from etude.kit.tasks import end_tasks, start_watched
from etude.records import Status, Task, ToolResult
from etude.sandbox.errors import SandboxKilledByAgentError, SandboxStateError
from etude.sandbox.interface import Sandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Resources, SnapshotKind

_SEARCH = "semantic_search"
SessionState = Literal["open", "paused", "submitted", "closed"]
__all__ = ["EnvironmentSession", "Outcome", "SessionServices", "SessionState"]


class EnvironmentSession(TurnRunner):
    """Implements `Workspace`, records turns, grades and forks. For one event loop.

    Calls raise InfrastructureError if something behind them failed, AgentError if the agent ended its own
    sandbox, and SandboxStateError while the session is paused, submitted or closed.
    """

    def __init__(
        self,
        services: SessionServices,
        origin: Origin,
        sandbox: Sandbox,
        task: Task | None = None,
        instruction: str | None = None,
        test_paths: tuple[str, ...] = (),
        user: User | None = None,
        history: History | None = None,
        tool_state: ToolState | None = None,
    ) -> None:
        """Takes ownership of the sandbox. Use `begin` for a task and `open` for other origins."""
        super().__init__(history or History(), services.tools)
        self.id = f"session-{secrets.token_hex(8)}"
        self.services = services
        self.origin = origin
        self.task = task
        self.instruction = instruction if instruction is not None else (task.instruction if task else "")
        self.sandbox = sandbox
        self._search: WorkspaceSearch | None = None
        if services.indexes is not None and origin.template is not None:
            self._search = services.indexes.search(
                origin.template, sandbox, lambda: origin.make(services.backend, services.life_s)
            )
            if history is not None:
                self._search.changed_somewhere()
        self._servers = open_servers(services.servers, sandbox)
        template = origin.template or Template()
        paths = task.test_paths if task else test_paths
        self.context = ToolContext(
            sandbox,
            services.tools,
            paths,
            services.limits,
            tool_state or ToolState(),
            self._search,
            user=user,
            servers=self._servers,
            workspace=template.workspace,
            has_environment=template.image is not None and not paths,
        )
        self.facts = SessionFacts()
        for turn in self.history.turns:
            self.facts.on_turn(turn.calls, turn.results)
        self.state: SessionState = "open"
        self.created_s = time.time()
        self.parent: str | None = None
        """The session of which this one is a fork; `parent_turn`: at which turn."""
        self.parent_turn: int | None = None
        self.differences: tuple[Difference, ...] = ()
        """Calls whose results in the replay that made this fork differ from the original."""
        self.agent_error: str | None = None
        """How the agent ended its own sandbox."""
        self.grade_s = 0.0
        """Seconds that grading took."""
        self.tool_time = self._time_of_step()
        self.snapshots = Snapshots(services.snapshot_every)
        self._lock = asyncio.Lock()
        self._grading: asyncio.Task[Outcome] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    def begin(
        cls,
        services: SessionServices,
        task: Task,
        resources: Resources | None = None,
        reach: tuple[str, ...] = (),
    ) -> EnvironmentSession:
        """Begins a session on a task. The sandbox is created in the background; the first use waits for it.
        `reach`: hosts that it may reach in addition to the task's own, as in `Network.allow`."""
        origin = task_origin(task, resources or Resources(), reach)
        sandbox = DeferredSandbox(origin.make(services.backend))
        return cls(services, origin, sandbox, task, user=user_of(task))

    @classmethod
    async def open(
        cls,
        services: SessionServices,
        origin: Origin,
        task: Task | None = None,
        instruction: str | None = None,
        test_paths: tuple[str, ...] = (),
    ) -> EnvironmentSession:
        """Creates the sandbox and begins a session on it. Raises as `SandboxBackend.create`."""
        sandbox = await origin.make(services.backend, services.life_s)
        return cls(services, origin, sandbox, task, instruction, test_paths, user=user_of(task))

    @property
    def num_turns(self) -> int:
        """Turns that have ended."""
        return len(self.history.turns)

    @property
    def finished(self) -> bool:
        """Whether the agent itself has ended the session."""
        return self.facts.finished

    @property
    def busy(self) -> bool:
        """Whether an operation is in progress."""
        return self._lock.locked() or self.in_turn

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, once it is graded."""
        grading = self._grading
        return grading.result() if grading and grading.done() and not _has_failed(grading) else None

    async def archive(self, path: str, text: str) -> str:
        async with self._lock:
            self._check_open()
            try:
                await self.sandbox.files.write(path, text)
            except SandboxKilledByAgentError as error:
                self.agent_error = error.message
                raise
            except AgentError as error:
                return error.message
            self.history.archive(path, text)
            self.events.put("archived", path=path)
            return ""

    async def next_step(self) -> str | None:
        """Verifies the step that the agent has ended and begins the next one; returns the user's next
        instruction. None: there is no further step, and `submit` grades the rest.

        Faults of the agent are part of the verdict. Raises SandboxError, TaskError as `submit`.
        """
        async with self._lock:
            self._check_open()
            task, done = self.task, [ended.verdict for ended in self.history.steps]
            if task is None or not task.steps:
                return None
            run = StepRun(task, self.sandbox, self.services.grader, list(done))
            if run.step is None or run.is_last:
                return None
            began = time.perf_counter()
            step = await run.end_step()
            self.grade_s += time.perf_counter() - began
            self.history.steps += [StepEnded(self.num_turns, one) for one in run.verdicts[len(done) :]]
            if step is None:
                return None
            self.tool_time, self.facts.finished = self._time_of_step(), False
            self.context.changed_somewhere()
            self.events.put("step_began", name=step.name)
            return step.instruction

    async def _run_turn(self, turn: RunningTurn, known: Mapping[int, ToolResult]) -> list[ToolResult]:
        number = turn.number
        try:
            async with self._lock:
                self._check_open()
                if self._servers is not None:
                    await self._servers.start()
                if self._search is not None and any(call.name == _SEARCH for call in turn.calls):
                    await self._search.ready()  # not counted as the agent's time
                results = await self.tool_time.execute(
                    turn.calls, self.context, known, turn.on_call, turn.on_result
                )
                self.history.add(SessionTurn(turn.calls, tuple(results), turn.key))
                self.facts.on_turn(turn.calls, results)
                self.events.put("turn_ended", turn=number, finished=self.finished)
                failure = await self.snapshots.after_turn(self.num_turns, turn.calls, self.context)
                if failure is not None:
                    self.events.put("snapshot_failed", turn=number, message=failure)
            return results
        except BaseException as error:
            if isinstance(error, SandboxKilledByAgentError):
                self.agent_error = error.message
            self.events.put("turn_failed", turn=number, error=type(error).__name__, message=str(error))
            raise

    async def submit(self, status: Status | None = None, cause: str = "") -> Outcome:
        """Ends the session and grades it: no turn runs after this.

        `status`: how the agent's session ended; by default `done`, or `agent_error` if the agent killed its
        sandbox. Idempotent; grading that failed is tried again. Raises ConfigError without a task and for an
        infrastructure failure, SandboxStateError while it is paused or closed, SandboxError if our own
        machinery failed, TaskError for a task that cannot be graded.
        """
        if status == Status.INFRASTRUCTURE:
            raise ConfigError(
                "an infrastructure failure is never graded",
                field="status",
                received=status.value,
                fix="close the session",
            )
        if self.task is None:
            raise ConfigError(
                "the session has no task", field="session", received=self.id, fix="begin one with a task"
            )
        if self.state in ("paused", "closed"):
            raise self._unusable()
        self.state = "submitted"
        chosen = status or (Status.AGENT_ERROR if self.agent_error else Status.DONE)
        if self._grading is None or _has_failed(self._grading):
            self._grading = start_watched(self._grade(self.task, chosen, cause))
        return await asyncio.shield(self._grading)

    async def diff(self) -> dict[str, bytes | None]:
        """See Sandbox.diff; the harness' own files are left out."""
        async with self._lock:
            if self.state == "closed":
                raise self._unusable()
            return dict(await self.sandbox.diff(HARNESS_DIRECTORY))

    async def pause(self) -> SnapshotKind:
        """Pauses the sandbox; returns what is preserved (the most that its backend can). Idempotent."""
        async with self._lock:
            self._check_going()
            able = (await self.services.backend.hello()).pause
            kind: SnapshotKind = "full" if "full" in able else "filesystem"
            if self.state == "open":
                if self._servers is not None:  # the next turn starts them again
                    await self._servers.close()
                await self.sandbox.pause(kind)
                if self.state != "open":  # ended meanwhile: grading, which waits for us, needs it awake
                    await self.sandbox.resume()
                self._check_going()
                self.state = "paused"
                self.events.put("paused", kept=kind)
            return kind

    async def resume(self) -> None:
        """Resumes the sandbox. Idempotent."""
        async with self._lock:
            self._check_going()
            if self.state == "paused":
                await self.sandbox.resume()
                self._check_going()
                self.state = "open"
                self.events.put("resumed")

    async def snapshot(self) -> str:
        """Makes a durable copy of the workspace, which outlives the session; returns its id."""
        async with self._lock:
            self._check_open()
            return (await self.sandbox.create_snapshot()).id

    async def fork(
        self, count: int = 1, turn: int | None = None
    ) -> list[EnvironmentSession | InfrastructureError]:
        """Copies of the session as it is or as it was after `turn` turns; this one continues as well.

        At the present turn the sandbox is copied; for an earlier one the nearest snapshot (or the origin) is
        used and the calls since then are replayed: see `differences` of the forks. Each item of the result is
        a session or the error that prevented it. Raises ConfigError if there was no such turn,
        SandboxStateError once the session was submitted.
        """
        self._check_going()  # at any turn: a verdict must not help to find a better one
        if turn is None or turn == self.num_turns:
            async with self._lock:
                self._check_open()
                forks = await fork_here(self, count)
        else:
            forks = await fork_at(self, count, turn)
        self.events.put("forked", count=len(forks), turn=self.num_turns if turn is None else turn)
        return forks

    async def close(self) -> None:
        """Closes everything that belongs to the session. Idempotent; continues if the caller is cancelled."""
        if self._closing is None:
            self.state = "closed"
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def branch(
        self, sandbox: Sandbox, turn: int, tool_state: ToolState, user: User | None
    ) -> EnvironmentSession:
        """A separate session on a copy of the sandbox after `turn` turns, with copies of the states of tools
        and user at that time.

        For `forking`. Takes ownership of the sandbox.
        """
        history = self.history.until(turn)
        made = EnvironmentSession(
            self.services,
            self.origin,
            sandbox,
            self.task,
            self.instruction,
            self.context.test_paths,
            user=copy.deepcopy(user),
            history=history,
            tool_state=copy.deepcopy(tool_state),
        )
        made.parent, made.parent_turn = self.id, turn
        if len(history.steps) == len(self.history.steps):
            made.tool_time.spent_s = self.tool_time.spent_s
        made.snapshots.adopt(self.snapshots.until(turn))
        return made

    async def _grade(self, task: Task, status: Status, cause: str) -> Outcome:
        async with self._lock:
            began = time.perf_counter()
            # An agent that ended its own sandbox has left nothing to grade.
            is_dead = status is Status.AGENT_ERROR
            dead = [Verdict(False, 0, 0, cause or self.agent_error, 0.0)] if is_dead else []
            done = [ended.verdict for ended in self.history.steps]
            if task.steps:
                verdict = await StepRun(task, self.sandbox, self.services.grader, [*done, *dead]).end()
            else:
                verdict = dead[0] if dead else await self.services.grader.grade(task, self.sandbox)
            evidence = Evidence(task, status, verdict, self.facts.to_dict())
            outcome = Outcome(status, verdict, compute_reward(evidence, self.services.reward))
            self.grade_s += time.perf_counter() - began
        self.events.put("graded", passed=outcome.verdict.passed, reward=outcome.reward.total)
        return outcome

    async def _close(self) -> None:
        tasks = [self._grading, self._running and self._running.task]
        await end_tasks(*(task for task in tasks if task is not None))
        async with AsyncExitStack() as ends:  # each is tried, the last one first
            ends.callback(self.events.close)
            ends.callback(self.events.put, "closed")
            if self._search is not None:
                ends.callback(self._search.close)
            ends.push_async_callback(self.snapshots.release, self.services.backend)
            if self._servers is not None:
                await self._servers.close()
            await self.sandbox.kill()

    def _time_of_step(self) -> ToolTime:
        """The time limit of the agent's calls in the current step."""
        task = self.task
        if task is not None and task.steps:
            task = task.at_step(min(len(self.history.steps), len(task.steps) - 1))
        return ToolTime(task.machine.agent_s if task is not None and task.machine else 0.0)

    def _check_open(self) -> None:
        if self.state != "open":
            raise self._unusable()
        if self.agent_error is not None:
            raise SandboxKilledByAgentError(self.agent_error, field="session", received=self.id)

    def _check_going(self) -> None:
        """Raises once it was submitted or closed: both take effect at once and permanently."""
        if self.state in ("submitted", "closed"):
            raise self._unusable()

    def _unusable(self) -> SandboxError:
        fixes = {"paused": "resume it first", "submitted": "fork an open session instead", "closed": ""}
        return SandboxStateError(
            f"the session is {self.state}", field="session", received=self.id, fix=fixes[self.state] or None
        )


def _has_failed(grading: asyncio.Task[Outcome]) -> bool:
    """Whether grading has ended without an outcome, and may be tried again."""
    return grading.done() and (grading.cancelled() or grading.exception() is not None)
