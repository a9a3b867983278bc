"""Token budget of a session: of its current context, and of all its contexts together."""

from __future__ import annotations

from dataclasses import dataclass

from etude.agent.limits import SessionLimits
from etude.agent.summary import SummaryPolicy


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits that apply after `num_summaries` summaries."""

    limits: SessionLimits
    summary: SummaryPolicy | None
    request_tokens: int
    """Length of the message that asks for a summary."""
    num_summaries: int
    trigger: int
    """Length at which the current context is summarised."""

    @property
    def may_summarise(self) -> bool:
        """Whether a full context is summarised; otherwise it ends the session."""
        return self.summary is not None and self.num_summaries < self.summary.max_summaries

    @property
    def reserve(self) -> int:
        """Tokens of a context that are kept free for its summary."""
        if self.summary is None or not self.may_summarise:
            return 0
        return self.request_tokens + self.summary.max_summary_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens that one context may use, without the reserve for its summary."""
        return self.limits.max_tokens - self.reserve

    @property
    def opening_tokens(self) -> int:
        """Most tokens with which a context may begin after a summary."""
        assert self.summary is not None
        return min(self.summary.at_tokens, self.context_tokens)

    def is_spent(self, session_tokens: int) -> bool:
        """Whether `session_tokens`, of all contexts, leave none for another message."""
        limit = self.limits.max_session_tokens
        return limit is not None and session_tokens >= limit

    def is_full(self, length: int, *, summarising: bool) -> bool:
        """Whether a context of this length has no room left for the current message."""
        return length >= (self.limits.max_tokens if summarising else self.context_tokens)

    def message_room(
        self, length: int, begun: int, session_tokens: int, most: int, *, summarising: bool
    ) -> int:
        """Tokens left for the next message, or for the rest of a partial one; 0 or less: no room.

        `length`: of the context; `begun`: tokens sampled of the message so far; `most`: limit of one
        request, not applied to summaries.
        """
        limits = self.limits
        if summarising and self.summary is not None:
            room = min(limits.max_tokens - length, self.summary.max_summary_tokens - begun)
        else:
            room = min(self.context_tokens - length, min(limits.max_message_tokens, most) - begun)
        if limits.max_session_tokens is not None:
            room = min(room, limits.max_session_tokens - session_tokens)
        return room
