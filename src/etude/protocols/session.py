"""The seam between an agent and its driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.records import SampleChunk, SamplingParams, Status, ToolCall, ToolResult


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Ask the policy for the next message. `tokens[:known]` are what the last answer's digest names."""

    tokens: NDArray[np.int32]
    """[T] the whole context."""
    known: int
    prefix_digest: str | None
    params: SamplingParams
    stop_tokens: frozenset[int]
    segment_index: int
    summarising: bool = False
    """Whether the message will be the agent's summary of its own context."""


@dataclass(frozen=True, slots=True)
class RunCalls:
    """Run these calls of one turn and report their results in this order."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Archive:
    """Keep a full context where the agent can read it: `text` as the workspace's file `path`."""

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

    `next_action` says what is to be done; the runner does it and reports. Asking again before reporting
    gives the same action.
    """

    def next_action(self) -> Action: ...

    def on_prefix_miss(self) -> None:
        """Learns that the sampler holds nothing of the session: the next `Sample` has `known` 0."""
        ...

    def on_chunk(self, chunk: SampleChunk) -> None:
        """Takes sampled tokens; the chunk with `finish` set completes the message."""
        ...

    def on_results(self, results: Sequence[ToolResult]) -> None:
        """Takes the results of the calls last asked for, in order."""
        ...

    def on_archived(self, error: str = "") -> None:
        """The context last asked for has been kept, or could not be: why not, in words for the agent."""
        ...

    def on_user(self, text: str, by_person: bool = True) -> None:
        """More words of the user: a session that has ended goes on. Not `by_person`: unless it has no turn
        left."""
        ...

    def stop(self, status: Status, cause: str) -> None:
        """Ends the session from outside."""
        ...
