"""What the sessions of one environment share, and what a session earns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.agent import Registry, ToolLimits
from etude.agent.index.templates import TemplateIndexes
from etude.config import McpConfig, RewardConfig
from etude.environment.grading import Verdict
from etude.environment.rewards import Evidence, compute_reward
from etude.environment.steps import StepRun
from etude.environment.verdicts import Grader
from etude.records import RewardBreakdown, Status, Task
from etude.sandbox.interface import Sandbox, SandboxBackend


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """What the sessions of one environment share."""

    backend: SandboxBackend
    grader: Grader
    tools: Registry
    limits: ToolLimits = field(default_factory=ToolLimits)
    reward: RewardConfig = field(default_factory=RewardConfig)
    indexes: TemplateIndexes | None = None
    """Code indexes; None: sandboxes search by themselves."""
    servers: Mapping[str, McpConfig] = field(default_factory=dict[str, McpConfig])
    """MCP servers of each session, with what they offer."""
    snapshot_every: int = 0
    """Turns that changed something after which a snapshot is taken, so that forks at earlier turns replay
    less; 0: none is."""
    life_s: float | None = None
    """Sandboxes end by themselves after it, whatever becomes of this process."""

    async def judge(
        self,
        task: Task,
        sandbox: Sandbox,
        status: Status,
        cause: str | None,
        facts: Mapping[str, Any],
        steps: Sequence[Verdict] = (),
    ) -> Outcome:
        """What a session earned that ended so. Of an agent that ended its own sandbox nothing is left to be
        graded: `cause` says how. `steps`: verdicts on the task's steps that have ended. Raises as
        `Grader.grade`."""
        dead = [Verdict(False, 0, 0, cause, 0.0)] if status is Status.AGENT_ERROR else []
        run = StepRun(task, sandbox, self.grader, [*steps, *dead])
        if task.steps:
            verdict = await run.end()
        else:
            verdict = dead[0] if dead else await self.grader.grade(task, sandbox)
        return Outcome(status, verdict, compute_reward(Evidence(task, status, verdict, facts), self.reward))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session earned."""

    status: Status
    verdict: Verdict
    reward: RewardBreakdown
