"""Branches of a session, and the plan that matches a request's history to them: which branch has the longest
common prefix, which of its tokens are kept, and what is added. See `session_map` for the rules. A branch is
one token sequence that grows message by message and becomes a `Segment`.

entries   [opening][user][answer][results]            messages that have ended, by content
tokens    ...............................|frame|...   with `framed`, also the tokens before an answer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

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
from etude.tokens.renderer import Renderer

RendererFor = Callable[[Opening], Renderer]
_MAX_FRAMINGS = 64
_ROLES = {Opening: "system", SystemWords: "system", UserWords: "user", Results: "tool", Answer: "assistant"}


@dataclass(frozen=True, slots=True)
class History:
    """The conversation of a request, with the key of each message."""

    messages: tuple[Message, ...]
    """The opening first."""
    keys: tuple[bytes, ...]
    encoded: Mapping[int, Tokens] = field(default_factory=dict[int, Tokens])
    """Index of a message -> its tokens, if they were encoded beforehand: see `encode_messages`."""

    @classmethod
    def of(cls, messages: Sequence[Message] | History) -> History:
        """Computes the keys; returns a History unchanged."""
        if isinstance(messages, History):
            return messages
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
    """Its first token; of a sampled message, the first sampled one."""
    sampled: bool = False
    """Whether it was sampled, and is trained, in this branch; a copy is not."""
    stripped: bool = False
    """Whether its reasoning was left out of the tokens."""
    reasons: bool = False
    """Whether its tokens contain reasoning."""
    num_frame: int = 0
    """Tokens of the frame before a given answer that are included from `start`."""
    shown: bool = False
    """Whether it is rendered as a given answer without reasoning: see `Framing.answer_frame`."""
    closed: bool = True
    """Whether it ends with the end token: an answer that was cut does not."""
    continued: bool = False
    """Whether a later request contained it: the client used it."""


Piece = tuple[Entry, Tokens]
"""One message that a plan appends."""


@dataclass(slots=True, eq=False)
class Branch:
    """One growing segment. At most one answer is being sampled on it at a time (`busy`)."""

    id: str
    number: int
    agent_id: str
    relation: Relation
    parent: tuple[Branch, int] | None
    """The branch from which it branched off, and at which token."""
    framing: Framing
    params: SamplingParams
    recording: Recording = field(default_factory=Recording)
    entries: list[Entry] = field(default_factory=list[Entry])
    copied: int = 0
    """Number of tokens copied from the parent."""
    framed: bool = False
    busy: bool = False
    known: int = 0
    """Number of tokens whose keys and values the sampler has."""
    prefix_digest: str | None = None
    last_used: int = 0

    def num_common(self, history: History) -> int:
        """Number of messages in the common prefix of this branch and a history."""
        count = 0
        for entry, key, message in zip(self.entries, history.keys, history.messages, strict=False):
            if entry.key != key or not _reasons_alike(entry.message, message):
                break
            count += 1
        return count

    def num_call_ids(self, history: History, count: int) -> int:
        """Among the first `count` messages, the number of answers whose call ids are those of this branch."""
        same = 0
        for entry, message in zip(self.entries[:count], history.messages, strict=False):
            if isinstance(message, Answer) and isinstance(entry.message, Answer) and message.calls:
                same += [call.id for call in message.calls] == [call.id for call in entry.message.calls]
        return same

    def num_usable(self, count: int, strip_before: int) -> int:
        """Number of leading messages, of the first `count`, whose tokens have the wanted form.

        Answers before message `strip_before` must be without reasoning, later ones with it.
        """
        for place, entry in enumerate(self.entries[:count]):
            wanted = place < strip_before
            if (entry.reasons and wanted) or (entry.stripped and not wanted):
                return place
        return count

    def append(self, entry: Entry, tokens: Tokens) -> None:
        """Adds a given message and sets its bounds. A cut answer before it is closed first."""
        self.close_answer()
        if len(tokens):
            entry.start = self.recording.length
            self.recording.append_given(tokens, _ROLES[type(entry.message)])
        entry.end = self.recording.length
        self.entries.append(entry)

    def close_answer(self) -> None:
        """Adds the end token that a cut answer lacks."""
        if self.entries and not self.entries[-1].closed:
            if len(self.framing.end):
                self.recording.append_given(self.framing.end, "assistant")
            last = self.entries[-1]
            last.closed, last.end = True, self.recording.length

    def copy_from(self, source: Branch, num_entries: int) -> None:
        """Copies another branch's first messages, marked as not sampled here."""
        self.entries = [replace(entry, sampled=False) for entry in source.entries[:num_entries]]
        offset = self.entries[-1].end if self.entries else 0
        tokens = source.recording.tokens
        for span in source.recording.turn_spans:
            if span.end <= offset:
                self.recording.append_given(tokens[span.start : span.end], span.role)
        assert self.recording.length == offset, "messages are covered by their spans"
        self.copied = offset

    def owner_of(self, offset: int) -> Branch:
        """The branch in which the message that ends at `offset` was first added."""
        branch = self
        while branch.parent is not None and 0 < offset <= branch.copied:
            branch = branch.parent[0]
        return branch


@dataclass(frozen=True, slots=True)
class Plan:
    """The branch that a history continues, and the messages that it adds."""

    source: Branch | None
    num_common: int
    """Number of messages that source and history have in common."""
    num_kept: int
    """Number of these whose tokens are kept."""
    grows: bool
    """Whether the source itself grows; else a new branch begins."""
    relation: Relation
    pieces: tuple[Piece, ...]
    context_tokens: int
    framing: Framing


@dataclass(slots=True, eq=False)
class Planner:
    """Makes plans for the branches of one session map, which owns and extends them."""

    renderer_for: RendererFor
    keep_thinking: bool
    branches: list[Branch] = field(default_factory=list[Branch])
    answers: dict[bytes, tuple[Branch, Entry]] = field(default_factory=dict)
    """Key of a sampled answer -> the last one with this content."""
    _framings: dict[bytes, Framing] = field(init=False, default_factory=dict)

    def unseen(self, history: History) -> list[int]:
        """Indices of the messages that a plan would have to encode, judging by their contents."""
        known = {entry.key for branch in self.branches for entry in branch.entries}
        return [place for place, key in enumerate(history.keys) if key not in known]

    def plan(self, history: History, params: SamplingParams) -> Plan:
        """The plan for a request; changes nothing. Raises BadRequestError."""
        opening = history.messages[0]
        assert isinstance(opening, Opening), "a history begins with its opening"
        framing = self.framing(opening, history.keys[0])
        strip_before = 0 if self.keep_thinking else _last_user(history.messages)
        source, num_common, num_kept = self._find(history, strip_before)
        if num_common < 2 and not (opening.agent and num_common):
            source, num_common, num_kept = None, 0, 0
        grows = (
            source is not None
            and num_kept == len(source.entries)
            and not source.busy
            and _same_distribution(source.params, params)
            and (not source.framed or num_kept == len(history.messages))
        )
        relation = self._relation(history, source, num_common, num_kept)
        pieces = self._pieces(history, framing, source, num_common, num_kept, strip_before)
        kept_tokens = source.entries[num_kept - 1].end if source and num_kept else 0
        is_cut = bool(source and num_kept and not source.entries[num_kept - 1].closed)
        added = sum(len(tokens) for _, tokens in pieces)
        total = kept_tokens + len(framing.end) * is_cut + added + len(framing.answer_frame())
        return Plan(source, num_common, num_kept, grows, relation, pieces, total, framing)

    def _find(self, history: History, strip_before: int) -> tuple[Branch | None, int, int]:
        """(the branch with the longest common prefix, its length in messages, how many are usable)."""
        best: tuple[tuple[int, int, int, bool, int], Branch] | None = None
        for branch in self.branches:
            count = branch.num_common(history)
            if not count:
                continue
            usable = branch.num_usable(count, strip_before)
            ids = branch.num_call_ids(history, count)
            score = (count, usable, ids, usable == len(branch.entries) and not branch.busy, branch.last_used)
            if best is None or score > best[0]:
                best = (score, branch)
        return (None, 0, 0) if best is None else (best[1], best[0][0], best[0][1])

    def _relation(self, history: History, source: Branch | None, num_common: int, num_kept: int) -> Relation:
        if source is None:
            return Relation.SUBAGENT if self.branches else Relation.ROOT
        repeats = num_kept == num_common and num_common in (len(history.messages), len(source.entries))
        return Relation.FORK if repeats else Relation.REWRITE

    def _pieces(
        self,
        history: History,
        framing: Framing,
        source: Branch | None,
        num_common: int,
        num_kept: int,
        strip_before: int,
    ) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        kept = source.entries[num_kept - 1].end if source and num_kept else 0
        first = not kept
        before = source.recording.tokens[:kept] if source else framing.end[:0]
        for place in range(num_kept, len(history.messages)):
            message, key, made = history.messages[place], history.keys[place], history.encoded.get(place)
            if isinstance(message, Answer):
                known = (source, source.entries[place]) if source and place < num_common else None
                strip = place < strip_before
                entry, tokens = self._answer_piece(message, key, framing, first, strip, known, made)
            else:
                entry = Entry(message, key, 0)
                tokens = framing.render_given(message, first) if made is None else made
                tokens = framing.renderer.follow(before, tokens)
            first = first and not len(tokens)
            pieces.append((entry, tokens))
            before = tokens
        return tuple(pieces)

    def _answer_piece(
        self,
        answer: Answer,
        key: bytes,
        framing: Framing,
        first: bool,
        strip: bool,
        known: tuple[Branch, Entry] | None,
        made: Tokens | None,
    ) -> Piece:
        """An answer in a history, as given tokens: its sampled ones if they are known."""
        origin = known or self.answers.get(key)
        served = origin[1].message if origin else None
        if origin and isinstance(served, Answer) and same_reasoning(served.reasoning, answer.reasoning):
            return self._spliced(origin, key, framing, first, strip)
        given = replace(answer, reasoning="") if strip else answer
        entry = Entry(
            answer,
            key,
            0,
            stripped=strip and bool(answer.reasoning),
            reasons=bool(given.reasoning),
            num_frame=len(framing.answer_frame(first, shown=not framing.has_reasoning(given))),
            shown=not framing.has_reasoning(given),
        )
        tokens = framing.render_given(given, first) if made is None or strip else made
        return entry, tokens

    def _spliced(
        self, origin: tuple[Branch, Entry], key: bytes, framing: Framing, first: bool, strip: bool
    ) -> Piece:
        """An answer whose tokens are known, in a new frame: with its reasoning if that is wanted here, even
        if the other branch has left it out."""
        message = origin[1].message
        if origin[1].stripped and not strip:
            origin = self.answers.get(key, origin)
        branch, known = origin
        sampled = branch.recording.tokens[known.start + known.num_frame : known.end]
        reasons, stripped, shown = known.reasons, known.stripped, known.shown
        if strip and (reasons or (framing.template.thinking and not shown)):
            sampled, stripped = framing.without_reasoning(sampled), stripped or reasons
            reasons, shown = False, True
            if len(sampled) and int(sampled[-1]) in framing.renderer.end_tokens:
                sampled = sampled[:-1]
        end = framing.shown_end if shown else framing.end
        if not len(sampled) or sampled[-1] not in (*framing.renderer.end_tokens, *end):
            sampled = np.concatenate([sampled, end])
        frame = framing.answer_frame(first, shown=shown)
        entry = Entry(message, key, 0, stripped=stripped, reasons=reasons, num_frame=len(frame), shown=shown)
        return entry, np.concatenate([frame, sampled])

    def framing(self, opening: Opening, key: bytes) -> Framing:
        """The renderer of messages in conversations with this opening, which has this key."""
        framing = self._framings.get(key)
        if framing is None:
            if len(self._framings) >= _MAX_FRAMINGS:
                self._framings.clear()
            framing = self._framings[key] = Framing(self.renderer_for(opening), opening)
        return framing


def encode_messages(history: History, places: Sequence[int], framing: Framing) -> History:
    """The history with the messages at these indices encoded. May be called from any thread."""
    opening = history.messages[0]
    assert isinstance(opening, Opening), "a history begins with its opening"
    is_bare = not len(framing.render_given(opening, True))
    found: dict[int, Tokens] = {}
    for place in places:
        message, first = history.messages[place], place == 0 or (is_bare and place == 1)
        if not (first and isinstance(message, Results)):  # the plan refuses these
            found[place] = framing.render_given(message, first)
    return replace(history, encoded=found)


def _same_distribution(one: SamplingParams, other: SamplingParams) -> bool:
    return replace(one, max_tokens=1) == replace(other, max_tokens=1)


def _last_user(messages: Sequence[Message]) -> int:
    return max((place for place, one in enumerate(messages) if isinstance(one, UserWords)), default=0)


def _reasons_alike(known: Message, message: Message) -> bool:
    if isinstance(known, Answer) and isinstance(message, Answer):
        return same_reasoning(known.reasoning, message.reasoning)
    return True
