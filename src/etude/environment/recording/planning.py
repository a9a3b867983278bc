"""Where a history goes on: which branch shares most with it, what of it stays, what it adds. Changes nothing.

See `session_map` for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from etude.environment.recording.branches import Branch, Entry, History
from etude.records import Relation, SamplingParams
from etude.tokens.chat.framing import Framing, Tokens
from etude.tokens.chat.messages import Answer, Message, Opening, Results, UserWords, same_reasoning
from etude.tokens.renderer import Renderer

RendererFor = Callable[[Opening], Renderer]
Piece = tuple[Entry, Tokens]
"""One message that a plan appends."""
_MAX_FRAMINGS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a history goes on, and what it adds."""

    source: Branch | None
    num_common: int
    """Messages on which the source agrees."""
    num_kept: int
    """Of these, messages whose tokens are kept."""
    grows: bool
    """The source itself grows; else a branch of its own begins."""
    relation: Relation
    pieces: tuple[Piece, ...]
    context_tokens: int
    framing: Framing


@dataclass(slots=True, eq=False)
class Planner:
    """Plans for the branches of one session map, which owns and grows them."""

    renderer_for: RendererFor
    keep_thinking: bool
    branches: list[Branch] = field(default_factory=list[Branch])
    answers: dict[bytes, tuple[Branch, Entry]] = field(default_factory=dict)
    """The last sampled answer of each content."""
    _framings: dict[bytes, Framing] = field(init=False, default_factory=dict)

    def unseen(self, history: History) -> list[int]:
        """Places of the messages whose tokens a plan would make anew, as far as contents say."""
        known = {entry.key for branch in self.branches for entry in branch.entries}
        return [place for place, key in enumerate(history.keys) if key not in known]

    def plan(self, history: History, params: SamplingParams, ahead: Mapping[int, Tokens]) -> Plan:
        """`ahead`: see `encode_messages`. Raises BadRequestError."""
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
            and _same_law(source.params, params)
            and (not source.framed or num_kept == len(history.messages))
        )
        relation = self._relation(history, source, num_common, num_kept)
        pieces = self._pieces(history, framing, source, num_common, num_kept, strip_before, ahead)
        kept_tokens = source.entries[num_kept - 1].end if source and num_kept else 0
        is_cut = bool(source and num_kept and not source.entries[num_kept - 1].closed)
        added = sum(len(tokens) for _, tokens in pieces)
        total = kept_tokens + len(framing.end) * is_cut + added + len(framing.answer_frame())
        return Plan(source, num_common, num_kept, grows, relation, pieces, total, framing)

    def _find(self, history: History, strip_before: int) -> tuple[Branch | None, int, int]:
        """The branch that shares most, with how many messages agree, and how many of these have the form."""
        best: tuple[tuple[int, int, int, bool, int], Branch] | None = None
        for branch in self.branches:
            count = branch.num_common(history)
            if not count:
                continue
            formed = branch.num_in_form(count, strip_before)
            ids = branch.num_call_ids(history, count)
            score = (count, formed, ids, formed == len(branch.entries) and not branch.busy, branch.last_used)
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
        ahead: Mapping[int, Tokens],
    ) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        kept = source.entries[num_kept - 1].end if source and num_kept else 0
        first = not kept
        before = source.recording.tokens[:kept] if source else framing.end[:0]
        for place in range(num_kept, len(history.messages)):
            message, key, made = history.messages[place], history.keys[place], ahead.get(place)
            if isinstance(message, Answer):
                known = (source, source.entries[place]) if source and place < num_common else None
                strip = place < strip_before
                entry, tokens = self._answer_piece(message, key, framing, first, strip, known, made)
            else:
                entry = Entry(message, key, 0)
                tokens = framing.given(message, first) if made is None else made
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
        ahead: Tokens | None,
    ) -> Piece:
        """An answer in a history, as given tokens: those once sampled where they are known."""
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
        tokens = framing.given(given, first) if ahead is None or strip else ahead
        return entry, tokens

    def _spliced(
        self, origin: tuple[Branch, Entry], key: bytes, framing: Framing, first: bool, strip: bool
    ) -> Piece:
        """An answer whose tokens are known, in a frame of its own: as it was sampled, where its reasoning is
        wanted here and was left out there."""
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
        """What renders the messages of conversations with this opening, which has this key."""
        framing = self._framings.get(key)
        if framing is None:
            if len(self._framings) >= _MAX_FRAMINGS:
                self._framings.clear()
            framing = self._framings[key] = Framing(self.renderer_for(opening), opening)
        return framing


def encode_messages(history: History, places: Sequence[int], framing: Framing) -> dict[int, Tokens]:
    """Tokens of messages by their places, for `Planner.plan`. May be called from any thread."""
    opening = history.messages[0]
    assert isinstance(opening, Opening), "a history begins with its opening"
    is_bare = not len(framing.given(opening, True))
    found: dict[int, Tokens] = {}
    for place in places:
        message, first = history.messages[place], place == 0 or (is_bare and place == 1)
        if not (first and isinstance(message, Results)):  # the plan refuses these
            found[place] = framing.given(message, first)
    return found


def _same_law(one: SamplingParams, other: SamplingParams) -> bool:
    return replace(one, max_tokens=1) == replace(other, max_tokens=1)


def _last_user(messages: Sequence[Message]) -> int:
    return max((place for place, one in enumerate(messages) if isinstance(one, UserWords)), default=0)
