"""Groups from the middle of a session."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.config.base import Section

ForkTurn = Literal["random", "entropy", "first_edit"]


class ForkConfig(Section):
    """Sessions that are forked at one of their turns and compared with their siblings. See docs/forks.md."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the groups whose first session is forked after it has ended; 0: none. A fork makes a group of
    its own, which counts towards `rl.groups_per_step`."""
    size: int = Field(default=4, ge=2)
    """Siblings: sessions that go on from the forked state, compared with each other."""
    turn: ForkTurn = "entropy"
    """Message from which siblings continue, never a session's first. `random`: any. `entropy`: the one whose
    tokens were least likely on average. `first_edit`: the first one that changed a file."""
