"""Groups from the middle of a session."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.config.base import Section

ForkTurn = Literal["random", "entropy", "first_edit"]


class ForkConfig(Section):
    """Sessions that are forked at one of their turns, and compared with their siblings. See docs/forks.md."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Of the groups that are begun, those of which the first session is forked once it has ended; 0: none. A
    fork makes a group of its own, which counts towards `rl.groups_per_step`."""
    size: int = Field(default=4, ge=2)
    """Sessions that go on from the forked state, the forked session's own end among them."""
    turn: ForkTurn = "entropy"
    """The message that siblings write anew; never a session's first. `random`: any. `entropy`: the one whose
    tokens were the least likely on average. `first_edit`: the first that changed a file."""
