"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it was made. Units: tokens, steps."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    weight_updates: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no computing: their pages were there."""
    preemptions: int = 0
    """Times that a request lost its pages to an older one."""
    drafted_tokens: int = 0
    """Computed on the guess that they would be sampled."""
    accepted_tokens: int = 0
    """Of those, the ones that were."""
