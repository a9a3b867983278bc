"""The seam between the parts and where they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

T = TypeVar("T")
P = ParamSpec("P")
PartT = TypeVar("PartT", covariant=True)


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


class Handle(ABC, Generic[PartT]):
    """A part, wherever it lives: `await handle.call(Trainer.step, groups)`."""

    node: str = ""
    """The machine that it is on; empty where that is this process's."""

    @overload
    async def call(
        self, method: Callable[Concatenate[PartT, P], Awaitable[T]], *arguments: P.args, **named: P.kwargs
    ) -> T: ...

    @overload
    async def call(
        self, method: Callable[Concatenate[PartT, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T: ...

    async def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls the part's method of that name and waits for its answer. Errors come back as raised.

        Raises PartLostError where nobody is left to answer: it may or may not have been done.
        """
        return await self.send(method.__name__, arguments, named)

    @abstractmethod
    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What `call` does, for the method of that name."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends the part, which may close what it has opened. Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the part at once, whatever it is doing, as `kill -9` would. Idempotent."""


class Executor(Protocol):
    """Starts parts: in this process (`local`) or as Ray actors (`ray`)."""

    async def reserve(self, parts: Sequence[Resources]) -> None:
        """Reserves room for all of these parts at once. Raises ResourceError where there is none."""
        ...

    async def make_room(self, part: Resources) -> None:
        """Reserves room for one part, however long that takes; returns at once where it has some. Raises
        PartLostError."""
        ...

    def give_room(self, part: str) -> None:
        """Gives back what `make_room` reserved for the part of that name, if anything."""
        ...

    async def spawn(
        self, factory: Callable[..., T], *arguments: Any, resources: Resources | None = None, **named: Any
    ) -> Handle[T]: ...

    async def shutdown(self) -> None:
        """Stops every part that was spawned."""
        ...
