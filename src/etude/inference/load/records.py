"""What one turn of one session saw."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.errors import InfrastructureError


class LoadError(InfrastructureError):
    """A turn that was not answered whole. `field` is what it is counted under: an error code, or its kind."""


@dataclass(slots=True)
class TurnRecord:
    """Times in seconds of the runner's clock."""

    session: str
    turn: int
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    """Of each piece of the answer."""
    arrived_tokens: list[int] = field(default_factory=list)
    """Tokens in each piece, as far as the answer says."""
    done_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Input that was not computed again; None where the target does not say."""
    output_tokens: int = 0
    error: str = ""
    """Why there is no whole answer; empty where there is one."""

    def arrived(self, now_s: float, tokens: int = 1) -> None:
        """A piece of the answer is here."""
        if tokens > 0:
            self.arrivals_s.append(now_s)
            self.arrived_tokens.append(tokens)

    @property
    def latency_s(self) -> float:
        """From sending to the end."""
        return self.done_s - self.sent_s

    @property
    def first_token_s(self) -> float | None:
        """From sending to the first piece; None where none came."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    def gaps_s(self) -> list[float]:
        """Time from token to token: a piece of several tokens shares its gap out."""
        gaps: list[float] = []
        for before_s, after_s, tokens in zip(
            self.arrivals_s, self.arrivals_s[1:], self.arrived_tokens[1:], strict=False
        ):
            gaps += [(after_s - before_s) / tokens] * tokens
        return gaps
