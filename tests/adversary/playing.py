"""Sessions of an agent that attacks: played with the full tool set, graded as in training, on `local`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.agent import ToolLimits
from etude.agent.tools.registries import full_registry
from etude.config import RewardConfig
from etude.environment.origins import Origin, task_template
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.errors import AgentError, InfrastructureError
from etude.records import Status, ToolCall, ToolResult
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Resources
from tests.environment.target import TARGET
from tests.sandbox.backends import with_backend

RESOURCES = Resources(memory_bytes=128 << 20, num_processes=48)
LIMITS = ToolLimits(test_timeout_s=5.0, command_timeout_s=5.0)
SOLVE = tuple(
    ToolCall("write_file", {"path": path, "text": text}) for path, text in TARGET.solution_files.items()
)


@dataclass(frozen=True)
class Ended:
    """How a session ended: voided where the infrastructure failed, else with a verdict."""

    voided: str | None
    """What failed; None: the session was graded."""
    passed: bool
    cause: str | None
    outputs: tuple[str, ...]
    """What the calls answered."""
    raised: str | None = None
    """The agent error that ended the session before its grading."""


def command(text: str) -> ToolCall:
    """A call that runs a shell command."""
    return ToolCall("run_command", {"command": text})


def python(text: str) -> ToolCall:
    """A call that runs a Python program."""
    return command(f"python3 - <<'EOF'\n{text}\nEOF")


Turn = ToolCall | tuple[ToolCall, ...]
"""One call, or several that are made side by side."""


def play(
    *sessions: Sequence[Turn],
    resources: Resources = RESOURCES,
    reward: RewardConfig | None = None,
    sleeps: bool = False,
) -> list[Ended]:
    """Plays sessions, turn after turn and one after the other, on one backend.

    `sleeps`: each is put to sleep and woken before it is graded.
    """

    async def scenario(backend: SandboxBackend) -> list[Ended]:
        return [await play_on(backend, turns, resources, reward, sleeps) for turns in sessions]

    return with_backend("local", scenario)


async def play_on(
    backend: SandboxBackend,
    turns: Sequence[Turn],
    resources: Resources = RESOURCES,
    reward: RewardConfig | None = None,
    sleeps: bool = False,
) -> Ended:
    """As `play`, on a backend that is there."""
    grader = Grader(backend, resources, reward=reward)
    services = SessionServices(backend, grader, full_registry(), LIMITS, reward or RewardConfig())
    session = await EnvironmentSession.open(services, Origin(task_template(TARGET), resources), TARGET)
    results: list[ToolResult] = []
    raised = None
    try:
        status = Status.DONE
        for turn in turns:
            calls = [turn] if isinstance(turn, ToolCall) else turn
            try:
                results += await session.run_calls(calls, {}, lambda *_: None, lambda *_: None)
            except AgentError as error:
                status, raised = Status.AGENT_ERROR, str(error)
                break
        if sleeps and raised is None:
            try:
                await session.pause()
            except AgentError as error:
                raised = str(error)  # it goes on as it is
            else:
                await session.resume()
        outcome = await session.submit(status, raised or "")
    except InfrastructureError as error:
        return Ended(f"{type(error).__name__}: {error}", False, None, _outputs(results), raised)
    finally:
        await session.close()
    return Ended(None, outcome.verdict.passed, outcome.verdict.cause, _outputs(results), raised)


def _outputs(results: Sequence[ToolResult]) -> tuple[str, ...]:
    return tuple(result.output for result in results)
