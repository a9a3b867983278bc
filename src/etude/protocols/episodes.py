"""How far sessions have come that are played elsewhere: by a worker, by another cluster."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TokenTally(Protocol):
    """Wants to know how far a session has come that samples elsewhere."""

    def tally(self, num_tokens: int) -> None:
        """The session has sampled so many tokens so far, those of failed attempts included."""
        ...
