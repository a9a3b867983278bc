"""What an agent reads before the user's words: how to work, and its tools."""

from __future__ import annotations

from dataclasses import replace

from etude.agent.tools.registries import agent_registry
from etude.config import AgentConfig
from etude.tokens.chat_format import ChatFormat, choose_format
from etude.tokens.grammar import ToolSchema, XmlGrammar
from etude.tokens.renderer import Renderer
from etude.tokens.template import ETUDE_TEMPLATE
from etude.tokens.tokenizer import Tokenizer

MANNERS = """You are a coding agent at work in a repository, which is your current directory. Look before you
change anything, keep changes small, and run the tests where there are any. Every message must call at least
one tool. When the work is done, or to answer the user, say so in a few words and call finish."""
"""The system message of models that were not trained with these tools."""
PEOPLE_MANNERS = """You are a coding agent at work in a repository, which is your current directory. Look
before you change anything, keep changes small, and run the tests where there are any. Call tools until the
work is done; a message without a call ends your turn: say in it what you did, answer the user, or ask."""
"""The same where a person reads the answers (`SessionLimits.words_end`)."""


def agent_format(tokenizer: Tokenizer, agent: AgentConfig) -> ChatFormat:
    """How the agent is spoken to, as the section `agent` says; a foreign one brings its own tools and words.
    Raises ConfigError where no known format fits the tokenizer, and for a tool that there is not."""
    chosen = choose_format(tokenizer, agent.template, agent.grammar)
    if agent.harness.command:
        return chosen
    tools, words = agent_words(agent, "core" if chosen.is_own else "full")
    has_tags = chosen.is_own and all(tokenizer.has_control(f"<{tool.name}>") for tool in tools)
    system = None if has_tags and agent.system == "auto" else words
    return replace(chosen, tools=tools, system=system)


def agent_words(agent: AgentConfig, auto_tools: str = "full") -> tuple[tuple[ToolSchema, ...], str]:
    """The tools and the system words that the section `agent` gives a model of others. `auto_tools`: what
    `auto` stands for. Raises ConfigError for a tool that there is not."""
    return agent_registry(agent, auto_tools).schemas, MANNERS if agent.system == "auto" else agent.system


def people_words(agent: AgentConfig) -> str:
    """The system words of the section `agent` where a person reads the answers."""
    return PEOPLE_MANNERS if agent.system == "auto" else agent.system


def open_renderer(tokenizer: Tokenizer, agent: AgentConfig) -> Renderer:
    """The renderer of the agent's sessions. Raises as `agent_format` does."""
    return agent_format(tokenizer, agent).renderer()


def own_control_tokens(agent: AgentConfig | None = None) -> list[str]:
    """What a tokenizer of our own holds as single tokens: the frame's marks and the tags of the tools that
    the section `agent` offers, by default the core ones. Raises ConfigError for a tool that there is not."""
    tools = agent_registry(agent or AgentConfig(), "core").schemas
    return [*ETUDE_TEMPLATE.control_tokens, *XmlGrammar(tools).control_tokens()]
