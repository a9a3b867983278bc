"""Self-summary: how a session goes on when its context is full.

At a trigger the agent is asked to summarise what it has done. Its answer is sampled and credited like any
other message; then a fresh context begins with the task's words, the summary, the to-do list, the number of
summaries so far, and the place where every earlier context can be read in full.
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
    """When a context is summarised, and in which words it is asked for. Raises ConfigError."""

    at_tokens: int
    """A context of so many tokens is summarised before the next message."""
    max_summary_tokens: int = 1024
    """Longer summaries are cut, and used as far as they go."""
    jitter: float = 0.0
    """Share by which the trigger may come earlier, drawn for each context: in training, so that the agent
    does not learn to expect it at one point."""
    max_summaries: int = 1000
    """After so many, a full context ends the session."""
    request: str = REQUEST
    """What the agent is asked."""

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
    """Where context number `context`, from 0, is kept in full."""
    return f"{HISTORY_DIRECTORY}/{context + 1:03d}.md"


def history_text(opening: str, turns: Sequence[Turn], without_end: Callable[[str], str]) -> str:
    """A context as the agent may read it again: how it began, each message `without_end`, what the tools
    answered."""
    parts = [opening]
    for number, turn in enumerate(turns, 1):
        parts.append(f"## message {number}\n{without_end(turn.text)}")
        parts += [f"### result {place}\n{result.output}" for place, result in enumerate(turn.results, 1)]
    return "\n\n".join(parts) + "\n"


def continuation(instruction: str, summary: str, todos: str, count: int, error: str = "") -> str:
    """The words with which a fresh context begins, after `count` summaries.

    `error`: why the last context could not be kept.
    """
    kept = (
        f"the last one could not be kept: {error}" if error else f"earlier ones in full: {HISTORY_DIRECTORY}/"
    )
    parts = [instruction, f"[context {count + 1}; {kept}]", summary]
    if todos:
        parts.append(f"To do:\n{todos}")
    return "\n\n".join(parts)


def fit_continuation(
    said: Sequence[str], summary: str, todos: str, count: int, error: str, fits: Callable[[str], bool]
) -> str | None:
    """`continuation` after all that the user has `said`, with summary and to-do list cut so that it fits;
    None if it never would."""

    def words(texts: Sequence[str]) -> str:
        return continuation("\n\n".join(said), texts[0], texts[1], count, error)

    texts = shorten_texts((summary, todos), lambda texts: fits(words(texts)))
    return None if texts is None else words(texts)


def shorten_texts(texts: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """The texts, the longest cut in their middle to one length so that they fit; None if none would.

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
    """At most `length` characters of the text: its head and its tail, with a mark between them."""
    if len(text) <= length:
        return text
    if length <= len(CUT):
        return CUT.strip()[:length]
    room = length - len(CUT)
    tail = room // 2
    return text[: room - tail] + CUT + (text[-tail:] if tail else "")
