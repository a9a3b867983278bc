"""The agent's tools, and the sets in which they are offered."""

from etude.agent.tools.interface import Access, Tool, ToolContext, ToolLimits
from etude.agent.tools.registries import (
    agent_registry,
    core_registry,
    full_registry,
    registry_named,
    registry_of,
)
from etude.agent.tools.registry import Registry, check_arguments, restricted

__all__ = [
    "Access",
    "Registry",
    "Tool",
    "ToolContext",
    "ToolLimits",
    "agent_registry",
    "check_arguments",
    "core_registry",
    "full_registry",
    "registry_named",
    "registry_of",
    "restricted",
]
