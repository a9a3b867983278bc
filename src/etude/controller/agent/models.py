"""Opens the chosen model, with everything that a session needs to sample from it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.agent import (
    Registry,
    RetryPolicy,
    SessionLimits,
    SummaryPolicy,
    ToolLimits,
    agent_registry,
)
from etude.agent.index.opening import open_indexes
from etude.agent.index.templates import TemplateIndexes
from etude.agent.prompts import interactive_system
from etude.config import AgentConfig, McpConfig, parse_section
from etude.errors import ConfigError, StoreError
from etude.protocols import Sampler
from etude.records import SamplingParams
from etude.sandbox.interface import Sandbox
from etude.tokens import Piece, Renderer
from etude.tokens.grammar import ParseEvent

BYTES_PER_TOKEN = 4
"""Assumed bytes per token of a chat endpoint: its sessions are counted in bytes."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The choice of a model on the command line; stored with the session. Raises ConfigError."""

    run: str = ""
    """Run directory."""
    model: str = ""
    """Hugging Face checkpoint directory."""
    endpoint: str = ""
    """Address of an OpenAI-compatible chat endpoint."""
    model_name: str = ""
    key_variable: str = ""
    native_tools: bool = True
    context_tokens: int = 128_000
    """Context of an endpoint's model."""
    temperature: float | None = None
    tools: str = ""
    """`core`, `full` or names; empty: the model's default."""
    index: str = ""
    """Code index, as `agent.index`; empty: `words` for an endpoint's model, `grep` for others, which may not
    have learned `semantic_search`."""

    def __post_init__(self) -> None:
        chosen = [name for name in ("run", "model", "endpoint") if getattr(self, name)]
        if len(chosen) != 1:
            raise ConfigError(
                "no model is named" if not chosen else "more than one model is named",
                field="model",
                received=", ".join(f"--{name}" for name in chosen) or None,
                fix="give one of --run DIR, --model DIR, or --endpoint URL with --model-name NAME",
            )
        if self.context_tokens < 2048:
            raise ConfigError(
                "is too small",
                field="--context-tokens",
                received=self.context_tokens,
                fix="give 2048 or more",
            )
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(
                "is not a valid temperature",
                field="--temperature",
                received=self.temperature,
                fix="give 0 (always the likeliest token) or more",
            )
        if self.run and self.tools:
            raise ConfigError(
                "a run's model can only use the tools that it was trained with",
                field="--tools",
                received=self.tools,
                fix="leave it out",
            )

    def in_place(self) -> ModelChoice:
        """The choice for a session in the directory itself, without an index. Raises ConfigError."""
        if self.run or self.index in ("none", "grep"):
            return self
        if self.index:
            raise ConfigError(
                "needs a copy of the directory, and --in-place makes none",
                field="--index",
                received=self.index,
                fix="leave it out: grep searches the directory as it is",
            )
        return replace(self, index="grep")

    def agent(self, servers: Mapping[str, McpConfig]) -> AgentConfig:
        """The equivalent section `agent`. Raises ConfigError."""
        index = self.index or ("words" if self.endpoint else "grep")
        return parse_section(
            AgentConfig, {"tools": self.tools or "auto", "index": index, "mcp": dict(servers)}
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Paths become absolute, so that a session can be continued from any directory."""
        paths = {
            name: str(Path(getattr(self, name)).resolve()) for name in ("run", "model") if getattr(self, name)
        }
        return {**asdict(self), **paths}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelChoice:
        """Reads what `to_dict` wrote, also versions with `script` (always empty). Raises StoreError."""
        try:
            return cls(**{name: value for name, value in document.items() if name != "script"})
        except TypeError as error:
            raise StoreError("the session is damaged", field="model", received=str(error)) from error


@dataclass(slots=True)
class Policy:
    """A model that is ready to sample, and the settings of its sessions."""

    label: str
    """Name for messages."""
    sampler: Sampler
    renderer: Renderer
    registry: Registry
    limits: SessionLimits
    params: SamplingParams
    tool_limits: ToolLimits
    system_with: Callable[[str], str | tuple[Piece, ...] | None] | None = None
    """Makes the system message with text appended; None: the model has a fixed one, the renderer's."""
    summary: SummaryPolicy | None = None
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    seed: int = 0
    index: str = "none"
    """As `agent.index`."""
    indexes: TemplateIndexes | None = None
    """Code indexes; None: sandboxes search by themselves."""
    servers: Mapping[str, McpConfig] = field(default_factory=dict[str, McpConfig])
    """MCP servers of each session, with their tools."""
    sampler_for: Callable[[Callable[[ParseEvent], None], int], Sampler] | None = None
    """Makes a session's own sampler, where one is needed. Arguments: a listener to text that arrives before
    its tokens, and the session's number of messages."""

    @property
    def system(self) -> str | tuple[Piece, ...] | None:
        """The system message; None: the renderer's own."""
        return None if self.system_with is None else self.system_with("")


@contextlib.asynccontextmanager
async def open_policy(
    choice: ModelChoice,
    one_shot: bool,
    servers: Mapping[str, McpConfig] | None = None,
    indexes: TemplateIndexes | None = None,
) -> AsyncIterator[Policy]:
    """Opens the chosen model. `one_shot`: with the limits that it was trained with, where they are known;
    `servers`: MCP servers whose tools it gets besides Étude's; `indexes`: of another policy of the same
    choice.

    Raises UserError for a model that does not exist or cannot be used, InfrastructureError for a server.
    """
    if servers and choice.run:
        raise ConfigError(
            "a run's model can only use the tools that it was trained with",
            field="--mcp",
            received=", ".join(servers),
            fix="leave it out, or train with the server in [agent.mcp]",
        )
    agent = choice.agent(await describe_unknown(servers or {}))
    async with open_model_of(choice, one_shot, agent) as policy:
        if indexes is not None:
            policy.indexes = indexes
            yield policy
            return
        async with open_indexes(policy.index) as policy.indexes:
            yield policy


async def describe_unknown(
    servers: Mapping[str, McpConfig], sandbox: Sandbox | None = None
) -> dict[str, McpConfig]:
    """All servers, each with its tools; servers whose tools are not known are queried."""
    unknown = {name: server for name, server in servers.items() if not server.described}
    if not unknown:
        return dict(servers)
    from etude.agent.mcp.client import describe_servers  # heavy, and an extra

    found = await describe_servers(unknown, sandbox)
    return {name: found.get(name, server) for name, server in servers.items()}


def open_model_of(
    choice: ModelChoice, one_shot: bool, agent: AgentConfig
) -> contextlib.AbstractAsyncContextManager[Policy]:
    """Opens the chosen model with the settings of `agent`, or of its run; no index is open yet."""
    if choice.endpoint:
        return _endpoint_policy(choice, agent)
    # Heavy: torch comes with it.
    from etude.controller.agent.local_models import open_model, open_run

    return open_run(choice, one_shot) if choice.run else open_model(choice, agent)


def people_tool_limits() -> ToolLimits:
    """Limits of tool calls in sessions with people: longer times and outputs than in rollouts."""
    return ToolLimits(
        read_lines=2000,
        grep_matches=100,
        output_characters=16_000,
        test_timeout_s=300.0,
        command_timeout_s=300.0,
    )


def people_session_limits(max_tokens: int) -> tuple[SessionLimits, SummaryPolicy]:
    """Limits of a session with a context of `max_tokens`, and its summary policy."""
    message, summary = min(65_536, max_tokens // 4), min(16_384, max_tokens // 16)
    limits = SessionLimits(
        max_turns=10_000,
        max_calls_per_turn=32,
        max_tokens=max_tokens,
        max_message_tokens=message,
        max_idle_turns=3,
        words_end=True,
    )
    return limits, SummaryPolicy(at_tokens=int(max_tokens * 0.6), max_summary_tokens=summary)


@contextlib.asynccontextmanager
async def _endpoint_policy(choice: ModelChoice, agent: AgentConfig) -> AsyncIterator[Policy]:
    from etude.agent.endpoint import Endpoint, EndpointSampler, endpoint_renderer

    registry = agent_registry(agent)
    endpoint = Endpoint(
        choice.endpoint,
        choice.model_name,
        choice.key_variable,
        choice.native_tools,
        temperature=choice.temperature,
    )
    renderer = endpoint_renderer(registry.schemas, choice.native_tools)
    limits, summary = people_session_limits(choice.context_tokens * BYTES_PER_TOKEN)
    opened: list[EndpointSampler] = []

    def sampler_for(on_event: Callable[[ParseEvent], None], num_messages: int) -> Sampler:
        opened.append(EndpointSampler(endpoint, renderer, registry.schemas, on_event))
        return opened[-1]

    def system_with(words: str) -> str | tuple[Piece, ...]:
        said = interactive_system(agent) + words
        return said if choice.native_tools else renderer.describe(said, registry.schemas)

    sampler = EndpointSampler(endpoint, renderer, registry.schemas)
    opened.append(sampler)
    try:
        yield Policy(
            label=f"{endpoint.model} at {endpoint.url}",
            sampler=sampler,
            renderer=renderer,
            registry=registry,
            limits=limits,
            params=SamplingParams(max_tokens=limits.max_tokens),
            tool_limits=people_tool_limits(),
            system_with=system_with,
            summary=summary,
            retry_policy=RetryPolicy(sampler_attempts=5, backoff_s=1.0),
            index=agent.index,
            servers=agent.mcp,
            sampler_for=sampler_for,
        )
    finally:
        for endpoint_sampler in opened:
            await endpoint_sampler.aclose()
