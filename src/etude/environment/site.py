"""What the sessions of one environment share, and what a session earns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.agent import Registry, ToolLimits
from etude.agent.index.templates import TemplateIndexes
from etude.config import McpConfig, RewardConfig
from etude.environment.grading import Verdict
from etude.environment.verdicts import Grader
from etude.records import RewardBreakdown, Status
from etude.sandbox.interface import SandboxBackend


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session earned."""

    status: Status
    verdict: Verdict
    reward: RewardBreakdown
