"""Interface of executors, which start parts in this process or as Ray actors, and of handles to parts."""

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
    """Resources that one part needs. Units: cores, devices, bytes."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_bytes: int = 0
    failure_domain: str = ""
    """Parts with the same domain may fail together; empty leaves placement free."""
    part: str = ""
    """Name of the part: in messages, and as the key of its reservation."""
    avoid: frozenset[str] = frozenset()
    """Machines, as `Handle.node` names them, on which it is started only if there is no other."""


class Handle(ABC, Generic[PartT]):
    """A part, in this process or another: `await handle.call(Trainer.step, groups)`."""

    node: str = ""
    """The machine that it runs on; empty for this process's."""

    @overload
    async def call(
        self, method: Callable[Concatenate[PartT, P], Awaitable[T]], *arguments: P.args, **named: P.kwargs
    ) -> T: ...

    @overload
    async def call(
        self, method: Callable[Concatenate[PartT, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T: ...

    async def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls the part's method of that name and returns its result, or raises its error.

        Raises PartLostError if the part is gone before it answers: the call may or may not have taken effect.
        """
        return await self.send(method.__name__, arguments, named)

    @abstractmethod
    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Implements `call` for the method of that name."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends the part after it has closed its resources. Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the part at once, as `kill -9` would. Idempotent."""


class Executor(Protocol):
    """Starts parts: in this process (`local`) or as Ray actors (`ray`)."""

    async def reserve(self, parts: Sequence[Resources]) -> None:
        """Reserves room for all of these parts at once. Raises ResourceError if there is not enough."""
        ...

    async def make_room(self, part: Resources) -> None:
        """Reserves room for one part and waits until there is some; returns at once if the part has a
        reservation. Raises PartLostError."""
        ...

    def release_room(self, part: str) -> None:
        """Releases what `make_room` reserved for the part of that name, if anything."""
        ...

    async def spawn(
        self, factory: Callable[..., T], *arguments: Any, resources: Resources | None = None, **named: Any
    ) -> Handle[T]: ...

    async def shutdown(self) -> None:
        """Stops every part that was spawned."""
        ...
