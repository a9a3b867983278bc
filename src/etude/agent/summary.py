"""Self-summary: how a session continues when its context is full.

At a trigger the agent is asked to summarise what it has done. Its answer is sampled and credited like any
other message; then a new context begins with the task's instruction, the summary, the to-do list, the number
of summaries so far, and the path where every earlier context can be read in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from etude.agent.tools.state import HARNESS_DIRECTORY
from etude.errors import ConfigError
from etude.records import Turn

HISTORY_DIRECTORY = f"{HARNESS_DIRECTORY}/history"

REQUEST = (
    "Your context is full. Write a summary of what the task needs: what you did and found, which files "
    "matter and why, what is left to do. Then a fresh context begins with it. Call no tools in this message."
)
CUT = "\n... cut ...\n"


@dataclass(frozen=True, slots=True)
class SummaryPolicy:
    """When a context is summarised, and the text of the request. Raises ConfigError."""

    at_tokens: int
    """A context of this length is summarised before the next message."""
    max_summary_tokens: int = 1024
    """Longer summaries are cut, and used as they are."""
    jitter: float = 0.0
    """Share by which the trigger may be earlier, drawn for each context: for training, so that the agent
    does not learn to expect it at a fixed point."""
    max_summaries: int = 1000
    """After this many, a full context ends the session."""
    request: str = REQUEST
    """The message that asks for a summary."""

    def __post_init__(self) -> None:
        checks = (
            ("at_tokens", self.at_tokens >= 1, ">= 1"),
            ("max_summary_tokens", self.max_summary_tokens >= 1, ">= 1"),
            ("jitter", 0.0 <= self.jitter < 1.0, "in [0, 1)"),
            ("max_summaries", self.max_summaries >= 0, ">= 0"),
        )
        for name, holds, bound in checks:
            if not holds:
                raise ConfigError(
                    f"must be {bound}", field=f"summary.{name}", received=getattr(self, name), fix="change it"
                )

    def trigger(self, trajectory_id: str, context: int) -> int:
        """Tokens at which context number `context` is summarised: a function of its arguments alone."""
        if not self.jitter:
            return self.at_tokens
        drawn = blake3(f"{trajectory_id}#{context}".encode()).digest(8)
        share = int.from_bytes(drawn, "little") / 2**64
        return max(1, round(self.at_tokens * (1 - self.jitter * share)))


def history_path(context: int) -> str:
    """Path of the archive of context number `context`, from 0."""
    return f"{HISTORY_DIRECTORY}/{context + 1:03d}.md"


def history_text(opening: str, turns: Sequence[Turn], without_end: Callable[[str], str]) -> str:
    """The archive of a context, for the agent to read: its opening, each message `without_end`, and the tool
    results."""
    parts = [opening]
    for number, turn in enumerate(turns, 1):
        parts.append(f"## message {number}\n{without_end(turn.text)}")
        parts += [f"### result {place}\n{result.output}" for place, result in enumerate(turn.results, 1)]
    return "\n\n".join(parts) + "\n"


def fit_continuation(
    user_texts: Sequence[str], summary: str, todos: str, count: int, error: str, fits: Callable[[str], bool]
) -> str | None:
    """The opening text of a new context after `count` summaries: all user messages, with summary and to-do
    list cut so that it fits; None if it cannot fit. `error`: why the last context could not be archived."""
    kept = (
        f"the last one could not be kept: {error}" if error else f"earlier ones in full: {HISTORY_DIRECTORY}/"
    )

    def opening(texts: Sequence[str]) -> str:
        parts = [*user_texts, f"[context {count + 1}; {kept}]", texts[0]]
        return "\n\n".join([*parts, f"To do:\n{texts[1]}"] if texts[1] else parts)

    texts = shorten_texts((summary, todos), lambda texts: fits(opening(texts)))
    return None if texts is None else opening(texts)


def shorten_texts(texts: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """The texts, the longest ones cut in their middle to one length so that they fit; None if they cannot.

    `fits` must hold for shorter texts where it holds for longer ones.
    """
    if fits(texts):
        return list(texts)
    low, high = -1, max((len(text) for text in texts), default=0)
    while high - low > 1:
        middle = (low + high) // 2
        if fits([cut_middle(text, middle) for text in texts]):
            low = middle
        else:
            high = middle
    return None if low < 0 else [cut_middle(text, low) for text in texts]


def cut_middle(text: str, length: int) -> str:
    """At most `length` characters of the text: its head and tail, with a mark between them."""
    if len(text) <= length:
        return text
    if length <= len(CUT):
        return CUT.strip()[:length]
    room = length - len(CUT)
    tail = room // 2
    return text[: room - tail] + CUT + (text[-tail:] if tail else "")
