"""The agent harness: the same code in the terminal, in the cloud and in rollouts."""

from etude.agent.execution import LocalWorkspace as LocalWorkspace
from etude.agent.execution import execute_calls as execute_calls
from etude.agent.facts import SessionFacts as SessionFacts
from etude.agent.journal import JournaledSession as JournaledSession
from etude.agent.prompts import agent_format as agent_format
from etude.agent.prompts import open_renderer as open_renderer
from etude.agent.runner import NextMessage as NextMessage
from etude.agent.runner import RetryPolicy as RetryPolicy
from etude.agent.runner import run_session as run_session
from etude.agent.session import AgentSession as AgentSession
from etude.agent.session import SessionLimits as SessionLimits
from etude.agent.summary import SummaryPolicy as SummaryPolicy
from etude.agent.tools import Registry as Registry
from etude.agent.tools import ToolContext as ToolContext
from etude.agent.tools import ToolLimits as ToolLimits
from etude.agent.tools import agent_registry as agent_registry
from etude.agent.tools import core_registry as core_registry
from etude.agent.tools import full_registry as full_registry
from etude.agent.tools import registry_named as registry_named
from etude.agent.tools import registry_of as registry_of
