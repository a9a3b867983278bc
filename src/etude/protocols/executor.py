"""The seam between the parts and where they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
HandleT = TypeVar("HandleT", covariant=True)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one part needs. Units: cores, devices, bytes."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_bytes: int = 0
    failure_domain: str = ""
    """Parts with the same domain may fail together; empty leaves placement free."""
    part: str = ""
    """Names the part: in messages, and to find what was reserved for it."""
    avoid: frozenset[str] = frozenset()
    """Machines, as `Handle.node` names them, that it must not be started on if there is another."""


class Handle(Protocol[HandleT]):
    """A part, wherever it lives."""

    @property
    def node(self) -> str:
        """The machine that it is on; empty where that is this process's."""
        ...

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of the part and waits for its answer. Errors come back as raised.

        Raises PartLostError where nobody is left to answer: it may or may not have been done.
        """
        ...

    async def stop(self) -> None:
        """Ends the part, which may close what it has opened. Idempotent."""
        ...

    def kill(self) -> None:
        """Ends the part at once, whatever it is doing, as `kill -9` would. Idempotent."""
        ...


class Executor(Protocol):
    """Starts parts: in this process (`local`) or as Ray actors (`ray`)."""

    async def reserve(self, parts: Sequence[Resources]) -> None:
        """Reserves room for all of these parts at once. Raises ResourceError where there is none."""
        ...

    async def spawn(
        self, factory: Callable[..., T], *arguments: Any, resources: Resources | None = None, **named: Any
    ) -> Handle[T]: ...

    async def shutdown(self) -> None:
        """Stops every part that was spawned."""
        ...
