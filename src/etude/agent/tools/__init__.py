"""The agent's tools, and the sets in which they are offered."""

from etude.agent.tools.interface import Access as Access
from etude.agent.tools.interface import Tool as Tool
from etude.agent.tools.interface import ToolContext as ToolContext
from etude.agent.tools.interface import ToolLimits as ToolLimits
from etude.agent.tools.registries import agent_registry as agent_registry
from etude.agent.tools.registries import core_registry as core_registry
from etude.agent.tools.registries import full_registry as full_registry
from etude.agent.tools.registries import registry_named as registry_named
from etude.agent.tools.registries import registry_of as registry_of
from etude.agent.tools.registry import Registry as Registry
from etude.agent.tools.registry import restricted as restricted
