"""A branch: one token sequence while it grows, message by message. Each becomes a `Segment`.

entries   [opening][user][answer][results]            messages that have ended, by content
tokens    ...............................|frame|...   with `framed`, what stands before an answer as well
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from etude.agent.recording import Recording
from etude.records import Relation, SamplingParams
from etude.tokens.chat.framing import Framing, Tokens
from etude.tokens.chat.messages import (
    Answer,
    Message,
    Opening,
    Results,
    SystemWords,
    UserWords,
    content_key,
    same_reasoning,
)

_ROLES = {Opening: "system", SystemWords: "system", UserWords: "user", Results: "tool", Answer: "assistant"}


@dataclass(frozen=True, slots=True)
class History:
    """A conversation as a request tells it, with the key of each message."""

    messages: tuple[Message, ...]
    """The opening first."""
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> History:
        """Computes the keys."""
        opening = messages[0]
        tools = opening.tools if isinstance(opening, Opening) else ()
        return cls(tuple(messages), tuple(content_key(message, tools) for message in messages))


@dataclass(slots=True, eq=False)
class Entry:
    """One message of a branch."""

    message: Message
    key: bytes
    end: int
    """One past its last token."""
    start: int = 0
    """Its first token; of a sampled one, the first that was sampled."""
    sampled: bool = False
    """Sampled in this branch, and trained here; a copy is not."""
    stripped: bool = False
    """Its reasoning was left out of the tokens."""
    reasons: bool = False
    """Its tokens hold reasoning."""
    num_frame: int = 0
    """Tokens of the frame before a given answer that `start` counts in."""
    shown: bool = False
    """Stands as one that was not sampled and has no reasoning: see `Framing.answer_frame`."""
    closed: bool = True
    """Ends with the end token: an answer that was cut does not."""
    continued: bool = False
    """A later request contained it: the client used it."""


@dataclass(slots=True, eq=False)
class Branch:
    """One growing segment. At most one answer is being sampled on it at a time (`busy`)."""

    id: str
    number: int
    agent_id: str
    relation: Relation
    parent: tuple[Branch, int] | None
    """The branch that it left, and at which token."""
    framing: Framing
    params: SamplingParams
    recording: Recording = field(default_factory=Recording)
    entries: list[Entry] = field(default_factory=list[Entry])
    copied: int = 0
    """Tokens that are the parent's."""
    framed: bool = False
    busy: bool = False
    known: int = 0
    """Tokens that the sampler holds."""
    prefix_digest: str | None = None
    last_used: int = 0

    def num_common(self, history: History) -> int:
        """Messages from the start on which this branch and a history agree."""
        count = 0
        for entry, key, message in zip(self.entries, history.keys, history.messages, strict=False):
            if entry.key != key or not _reasons_alike(entry.message, message):
                break
            count += 1
        return count

    def num_call_ids(self, history: History, count: int) -> int:
        """Among the first `count` messages, answers whose calls have the ids that were given out."""
        same = 0
        for entry, message in zip(self.entries[:count], history.messages, strict=False):
            if isinstance(message, Answer) and isinstance(entry.message, Answer) and message.calls:
                same += [call.id for call in message.calls] == [call.id for call in entry.message.calls]
        return same

    def num_in_form(self, count: int, strip_before: int) -> int:
        """Of the first `count` messages those that hold or lack reasoning as wanted.

        Answers before message `strip_before` shall be without it.
        """
        for place, entry in enumerate(self.entries[:count]):
            wanted = place < strip_before
            if (entry.reasons and wanted) or (entry.stripped and not wanted):
                return place
        return count

    def append(self, entry: Entry, tokens: Tokens) -> None:
        """Adds a message that is given; its bounds are set here. A cut answer before it is closed first."""
        self.close_answer()
        if len(tokens):
            entry.start = self.recording.length
            self.recording.give(tokens, _ROLES[type(entry.message)])
        entry.end = self.recording.length
        self.entries.append(entry)

    def close_answer(self) -> None:
        """Gives the end token that a cut answer lacks."""
        if self.entries and not self.entries[-1].closed:
            if len(self.framing.end):
                self.recording.give(self.framing.end, "assistant")
            last = self.entries[-1]
            last.closed, last.end = True, self.recording.length

    def copy_from(self, source: Branch, num_entries: int) -> None:
        """Takes over another branch's first messages; nothing of them counts as sampled here."""
        self.entries = [replace(entry, sampled=False) for entry in source.entries[:num_entries]]
        offset = self.entries[-1].end if self.entries else 0
        tokens = source.recording.tokens
        for span in source.recording.turn_spans:
            if span.end <= offset:
                self.recording.give(tokens[span.start : span.end], span.role)
        assert self.recording.length == offset, "messages are covered by their spans"
        self.copied = offset

    def owner_of(self, offset: int) -> Branch:
        """The branch in which the message that ends at `offset` was first."""
        branch = self
        while branch.parent is not None and 0 < offset <= branch.copied:
            branch = branch.parent[0]
        return branch


def _reasons_alike(known: Message, message: Message) -> bool:
    if isinstance(known, Answer) and isinstance(message, Answer):
        return same_reasoning(known.reasoning, message.reasoning)
    return True
