"""The agent's harness: one code in the terminal, in the cloud and in rollouts."""

from etude.agent.execution import LocalWorkspace, execute_calls
from etude.agent.facts import SessionFacts
from etude.agent.journal import JournaledSession
from etude.agent.prompts import agent_format, open_renderer
from etude.agent.runner import NextWords, Patience, Serving, Timings, run_session
from etude.agent.scripted import ScriptedSampler, play
from etude.agent.session import AgentSession, SessionLimits
from etude.agent.summary import SummaryPolicy
from etude.agent.tools import (
    Registry,
    ToolContext,
    ToolLimits,
    agent_registry,
    core_registry,
    full_registry,
    registry_named,
    registry_of,
)

__all__ = [
    "AgentSession",
    "JournaledSession",
    "LocalWorkspace",
    "NextWords",
    "Patience",
    "Registry",
    "ScriptedSampler",
    "Serving",
    "SessionFacts",
    "SessionLimits",
    "SummaryPolicy",
    "Timings",
    "ToolContext",
    "ToolLimits",
    "agent_format",
    "agent_registry",
    "core_registry",
    "execute_calls",
    "full_registry",
    "open_renderer",
    "play",
    "registry_named",
    "registry_of",
    "run_session",
]
