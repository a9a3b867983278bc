"""Interface between an agent's session and the runner that drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.records import SampleChunk, SamplingParams, Status, ToolCall, ToolResult


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Sample the next message. `tokens[:known]` is the prefix that the last answer's digest names."""

    tokens: NDArray[np.int32]
    """[T] the whole context."""
    known: int
    prefix_digest: str | None
    params: SamplingParams
    stop_tokens: frozenset[int]
    segment_index: int
    summarising: bool = False
    """Whether the message is the agent's summary of its own context."""


@dataclass(frozen=True, slots=True)
class RunCalls:
    """Run the calls of one turn and report their results in this order."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Archive:
    """Store a full context where the agent can read it: `text` as the workspace's file `path`."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The session is over."""

    status: Status
    cause: str = ""


Action = Sample | RunCalls | Archive | Finished


class Session(Protocol):
    """An agent's session as a pure state machine: no I/O inside, so it runs anywhere and replays exactly.

    `next_action` returns what the runner has to do; the runner does it and reports the result. Until then
    `next_action` returns the same action again.
    """

    def next_action(self) -> Action: ...

    def on_prefix_miss(self) -> None:
        """The sampler has dropped the session's keys and values: the next `Sample` has `known` 0."""
        ...

    def on_chunk(self, chunk: SampleChunk) -> None:
        """Adds sampled tokens; the chunk with `finish` set completes the message."""
        ...

    def on_results(self, results: Sequence[ToolResult]) -> None:
        """Adds the results of the last `RunCalls`, in order."""
        ...

    def on_archived(self, error: str = "") -> None:
        """The last `Archive` was stored, or failed: `error` says why, in words for the agent."""
        ...

    def on_user(self, text: str, by_person: bool = True) -> None:
        """Adds a message of the user; an ended session continues, not `by_person` only if turns are left."""
        ...

    def stop(self, status: Status, cause: str) -> None:
        """Ends the session from outside."""
        ...
