"""Data types: an attempt and its outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from etude.sandbox.types import Resources

if TYPE_CHECKING:
    from tests.adversary.escape.trial import Field

User = Literal["root", "plain"]
"""Whose process owns the sandboxes."""
USERS: tuple[User, ...] = ("root", "plain")
Verdict = Literal["held", "escaped", "lost", "impossible", "broken"]
"""`lost`: nothing got out, but the sandbox died, and the error blamed the infrastructure. `broken`: the
attempt itself failed, or an untyped error came out."""
Reach = Literal["everywhere", "shared kernel"]


@dataclass(frozen=True)
class Hole:
    """An attempt that succeeds today: what it does, and what would close it."""

    reason: str
    users: tuple[User, ...] = USERS
    without_groups_only: bool = False
    """Whether it is closed where the owner may make control groups."""


UNDECIDED_S = 120.0
"""Whatever takes longer has not been decided, however busy the machine: that is no verdict."""
DEFAULT_RESOURCES = Resources(memory_bytes=96 << 20, num_processes=32, disk_bytes=8 << 20)


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended, and what it printed or did."""

    verdict: Verdict
    detail: str


Scenario = Callable[["Field"], Awaitable[str]]
"""An attempt through the owner's calls; returns a line that begins with ESCAPED if it succeeded."""


@dataclass(frozen=True)
class Attempt:
    """One way out. `program` runs inside as Python; `scenario` runs outside, against the owner's calls.

    A program says ESCAPED when it reached what it was after, IMPOSSIBLE when this kernel lacks the feature,
    and raises OSError when it was refused. Beside that the scene is looked at: see `scene.Scene.damage`.
    """

    name: str
    protects: str
    """What stops it, in words."""
    lifts: tuple[str, ...]
    """The weakenings (see `weakening.py`) that together let it succeed; none of them is superfluous."""
    program: str = ""
    lifts_without_groups: tuple[str, ...] = ()
    """What must go beside these where there are no control groups."""
    scenario: Scenario | None = None
    reach: Reach = "everywhere"
    """`shared kernel`: what it opens is the kernel's own surface, harmless where the guest has its own."""
    neighbour: bool = False
    """Whether it needs a second sandbox to attack."""
    resources: Resources = DEFAULT_RESOURCES
    timeout_s: float = UNDECIDED_S
    users: tuple[User, ...] = USERS
    outside: str = ""
    """A program that does the same act on the host, where nothing stops it: a control beside weakenings."""
    control: Scenario | None = None
    """The same act by the owner's calls where it works: a control of a scenario beside weakenings."""
    no_control: str = ""
    """Why there is no control, where there is none."""

    @property
    def kind(self) -> str:
        """`program` or `calls`: from inside, or through the owner's calls."""
        return "program" if self.scenario is None else "calls"
