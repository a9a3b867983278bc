"""Limits of one session, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.errors import ConfigError
from etude.records import Status, ToolCall


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session. Reaching a limit is an outcome of the agent's, not an error."""

    max_turns: int = 10
    """Messages of the agent, summaries not counted."""
    max_calls_per_turn: int = 4
    """Calls above this are answered with one error and not run."""
    max_tokens: int = 768
    """One context, prompt and observations included: the model's window."""
    max_message_tokens: int = 128
    """One message of the agent; calls of a message that was cut here are not run."""
    max_idle_turns: int | None = None
    """Messages in a row without one well-formed call, after which the session ends; None: no such limit."""
    max_session_tokens: int | None = None
    """All contexts together."""
    words_end: bool = field(default=False, repr=False)
    """Whether a message in plain words, without any call, ends the session as `finish` does; else it is a
    turn without a call. For people's sessions alone, and so no part of the harness digest."""


@dataclass(slots=True)
class Progress:
    """Progress of a session; together with contexts, turns and facts the whole of its state."""

    message_start: int | None = None
    """First token of the message being sampled."""
    pending: tuple[ToolCall, ...] = ()
    """Calls whose results are awaited."""
    summarising: bool = False
    """Whether the next message is a summary."""
    summary: str | None = None
    """The summary, until the context that it closes has been archived."""
    idle_turns: int = 0
    """Messages without a well-formed call since the last one with."""
    todos: str = ""
    """The agent's to-do list as it last wrote it."""
    known: int = 0
    """Tokens of the present context that the sampler holds."""
    prefix_digest: str | None = None
    streaming: bool = False
    """Whether a chunk of the present request has come."""
    status: Status | None = None
    cause: str = ""


def too_small(message: str, received: int, needed: int) -> ConfigError:
    """The error for limits that leave no room for a message."""
    return ConfigError(
        message,
        field="agent.max_tokens",
        received=received,
        fix=f"allow more than {needed} tokens, or shorten the prompt",
    )
