"""System messages of the agent, and its chat format with tools."""

from __future__ import annotations

from dataclasses import replace

from etude.agent.tools.registries import agent_registry
from etude.config import AgentConfig
from etude.tokens.chat_format import ChatFormat, choose_format
from etude.tokens.grammar import ToolSchema, XmlGrammar
from etude.tokens.renderer import Renderer
from etude.tokens.template import ETUDE_TEMPLATE
from etude.tokens.tokenizer import Tokenizer

SYSTEM_PROMPT = """\
You are a coding agent at work in a repository, which is your current directory. Look before you
change anything, keep changes small, and run the tests where there are any. Every message must call at least
one tool. When the work is done, or to answer the user, say so in a few words and call finish."""
"""System message of models that were not trained with these tools."""
INTERACTIVE_SYSTEM_PROMPT = """\
You are a coding agent at work in a repository, which is your current directory. Look
before you change anything, keep changes small, and run the tests where there are any. Call tools until the
work is done; a message without a call ends your turn: say in it what you did, answer the user, or ask."""
"""The same for interactive sessions (`SessionLimits.words_end`)."""


def agent_format(tokenizer: Tokenizer, agent: AgentConfig) -> ChatFormat:
    """The chat format that the section `agent` configures; an external harness brings its own tools and
    system message. Raises ConfigError if no known format fits the tokenizer, and for an unknown tool."""
    chosen = choose_format(tokenizer, agent.template, agent.grammar)
    if agent.harness.command:
        return chosen
    tools, message = tools_and_system(agent, "core" if chosen.is_own else "full")
    has_tags = chosen.is_own and all(tokenizer.has_control(f"<{tool.name}>") for tool in tools)
    system = None if has_tags and agent.system == "auto" else message
    return replace(chosen, tools=tools, system=system)


def tools_and_system(agent: AgentConfig, auto_tools: str = "full") -> tuple[tuple[ToolSchema, ...], str]:
    """The tools and system message that the section `agent` gives a model not trained with them.
    `auto_tools`: the set that `auto` means. Raises ConfigError for an unknown tool."""
    system = SYSTEM_PROMPT if agent.system == "auto" else agent.system
    return agent_registry(agent, auto_tools).schemas, system


def interactive_system(agent: AgentConfig) -> str:
    """The system message of the section `agent` for interactive sessions."""
    return INTERACTIVE_SYSTEM_PROMPT if agent.system == "auto" else agent.system


def open_renderer(tokenizer: Tokenizer, agent: AgentConfig) -> Renderer:
    """The renderer of the agent's sessions. Raises as `agent_format` does."""
    return agent_format(tokenizer, agent).renderer()


def own_control_tokens(agent: AgentConfig | None = None) -> list[str]:
    """Control tokens of our own tokenizers: the template's, and the tags of the tools that the section
    `agent` offers, by default the core ones. Raises ConfigError for an unknown tool."""
    tools = agent_registry(agent or AgentConfig(), "core").schemas
    return [*ETUDE_TEMPLATE.control_tokens, *XmlGrammar(tools).control_tokens()]
