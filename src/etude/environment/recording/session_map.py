"""The session map: growing conversations onto token sequences. Pure: no I/O, no clock.

A request tells a whole history. The longest known history that it shares is where it goes on: those tokens
stay as they were given and sampled, only what is new is rendered.

    the history is known and ends here     the branch grows
    it was known further on                fork: a retry, or a step back; the same state is sampled again
    its branch is busy sampling            fork: requests at the same time
    it differs from some message on        rewrite: compaction, an edited or truncated history
    another system message or tools, or    subagent: a conversation of its own (with the same declared agent
      another first message                a rewrite)

A fork and a rewrite copy the tokens up to the last common message, and sample none of the copy: each
sampled token is `sampled` in exactly one branch. An answer that was sampled here and comes again elsewhere
in a history is given with its sampled tokens; one that nobody sampled here is rendered, and given.

With `keep_thinking` reasoning stays where it was sampled. Without, a history is laid out as Qwen3's template
does: answers before the user's last words lose their reasoning, so each such turn is a rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from etude.environment.recording.branches import Branch, Entry, History
from etude.environment.recording.errors import BadRequestError, ContextLengthError
from etude.environment.recording.framing import Framing, Tokens
from etude.environment.recording.messages import (
    Answer,
    Message,
    Opening,
    Results,
    SystemWords,
    UserWords,
    content_key,
    same_reasoning,
)
from etude.records import BlobRef, Relation, SampleChunk, SamplingParams, Segment, ToolResult, Turn
from etude.tokens.renderer import Renderer

KeepRoutes = Callable[[NDArray[np.uint8]], BlobRef]
RendererFor = Callable[[Opening], Renderer]
_MAX_FRAMINGS = 64


@dataclass(frozen=True, slots=True)
class MapLimits:
    """What one session may hold."""

    max_context_tokens: int = 32768
    """Of one branch, answers included."""
    max_branches: int = 512
    max_session_tokens: int = 1 << 24
    """Of all branches together, copies included."""


@dataclass(slots=True, eq=False)
class Generation:
    """One answer that is to be sampled: on which branch, from which token."""

    branch: Branch
    start: int
    params: SamplingParams
    """With `max_tokens` cut to the room that is left."""

    @property
    def tokens(self) -> Tokens:
        """The whole context."""
        return self.branch.recording.tokens


@dataclass(slots=True)
class Counts:
    """What happened to a session's histories."""

    requests: int = 0
    continued: int = 0
    forks: int = 0
    rewrites: int = 0
    subagents: int = 0
    failed: int = 0
    """Answers that the sampler never finished: nothing of them is kept."""
    aborted: int = 0
    """Answers that the client left while they were sampled: kept as far as they went."""
    malformed_calls: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """One message that a plan appends."""

    entry: Entry
    tokens: Tokens
    role: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a history goes on, and what it adds."""

    source: Branch | None
    num_common: int
    """Messages on which the source agrees."""
    num_kept: int
    """Of these, messages whose tokens are kept."""
    grows: bool
    """The source itself grows; else a branch of its own begins."""
    relation: Relation
    pieces: tuple[_Piece, ...]
    context_tokens: int
    framing: Framing


@dataclass(slots=True, eq=False)
class SessionMap:
    """All branches of one recorded session. One owner calls it; answers may be sampled at the same time."""

    trajectory_id: str
    renderer_for: RendererFor
    limits: MapLimits = field(default_factory=MapLimits)
    keep_thinking: bool = True
    branches: list[Branch] = field(init=False, default_factory=list[Branch])
    counts: Counts = field(init=False, default_factory=Counts)
    _answers: dict[bytes, tuple[Branch, Entry]] = field(init=False, default_factory=dict)
    """The last sampled answer of each content."""
    _framings: dict[bytes, Framing] = field(init=False, default_factory=dict)
    _last_answer: tuple[Branch, Entry] | None = field(init=False, default=None)
    _clock: int = field(init=False, default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches together, copies included."""
        return sum(branch.recording.length for branch in self.branches)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that a policy chose."""
        return sum(int(branch.recording.sampled.sum()) for branch in self.branches)

    def measure(self, messages: Sequence[Message], params: SamplingParams) -> int:
        """Tokens of the context that a request of these messages would have; changes nothing."""
        return self._plan(History.of(messages), params).context_tokens

    def begin(self, messages: Sequence[Message], params: SamplingParams) -> Generation:
        """Finds where a history (its opening first) goes on; adds what is new, up to where sampling begins.

        Raises ContextLengthError and BadRequestError; then nothing has changed.
        """
        history = History.of(messages)
        plan = self._plan(history, params)
        room = self.limits.max_context_tokens - plan.context_tokens
        if room <= 0:
            raise ContextLengthError(plan.context_tokens, self.limits.max_context_tokens)
        self._check_room(plan)
        branch = plan.source if plan.grows and plan.source else self._new_branch(plan, params, history)
        self._mark_continued(plan)
        for piece in plan.pieces:
            branch.append(piece.entry, piece.tokens, piece.role)
        branch.close_answer()
        if not branch.framed:
            role = branch.recording.turn_spans[-1].role
            branch.recording.give(branch.framing.answer_frame(branch.recording.length == 0), role)
            branch.framed = True
        self._clock += 1
        branch.busy, branch.last_used = True, self._clock
        self.counts.requests += 1
        self.counts.continued += plan.grows
        return Generation(
            branch, branch.recording.length, replace(params, max_tokens=min(params.max_tokens, room))
        )

    def commit(self, generation: Generation, chunks: Iterable[SampleChunk], answer: Answer) -> Entry | None:
        """Takes the sampled tokens, and what was served for them. Without tokens nothing was sampled.

        Raises SamplerError for chunks whose parts do not fit each other.
        """
        branch = generation.branch
        branch.busy = False
        if branch.known == 0:
            branch.recording.forget_routes()
        start = branch.recording.length
        for chunk in chunks:
            branch.recording.sample(chunk)
        end = branch.recording.length
        if end == start:
            return None
        branch.recording.end_message(start)
        branch.framed = False
        closed = int(branch.recording.tokens[-1]) == branch.framing.renderer.end_token
        entry = Entry(
            answer,
            content_key(answer),
            end,
            start,
            sampled=True,
            reasons=bool(answer.reasoning.strip()),
            closed=closed,
        )
        branch.entries.append(entry)
        self._answers[entry.key] = self._last_answer = (branch, entry)
        return entry

    def fail(self, generation: Generation) -> None:
        """The sampler failed: the branch stays as it was before the answer."""
        generation.branch.busy = False
        generation.branch.known, generation.branch.prefix_digest = 0, None
        self.counts.failed += 1

    def segments(self, keep_routes: KeepRoutes | None = None) -> tuple[Segment, ...]:
        """The branches as records, in the order of their beginnings; those that nothing was sampled on, nor
        on any that left them, are left out."""
        wanted: set[Branch] = set()
        for branch in self.branches:
            if not any(entry.sampled for entry in branch.entries):
                continue
            found: Branch | None = branch
            while found is not None and found not in wanted:
                wanted.add(found)
                found = found.parent[0] if found.parent else None
        return tuple(
            branch.segment(self.trajectory_id, _kept(branch, keep_routes))
            for branch in self.branches
            if branch in wanted
        )

    def turns(self) -> tuple[Turn, ...]:
        """Each sampled answer with the results that the client reported, branch by branch."""
        turns: list[Turn] = []
        for branch in self.branches:
            renderer = branch.framing.renderer
            for place, entry in enumerate(branch.entries):
                if not entry.sampled:
                    continue
                after = branch.entries[place + 1].message if place + 1 < len(branch.entries) else None
                outputs = after.outputs if isinstance(after, Results) else ()
                last = entry.end - _num_given(branch, entry)
                message = branch.recording.tokens[entry.start : last]
                turns.append(
                    Turn(
                        branch.id,
                        entry.start,
                        last,
                        renderer.tokenizer.decode(message),
                        tuple(renderer.parse(message)),
                        tuple(ToolResult(output) for output in outputs),
                    )
                )
        return tuple(turns)

    def abandoned(self) -> list[tuple[str, int, int]]:
        """Sampled answers (segment id, first token, one past the last) that no request went on from, although
        one went on from another answer to the same history."""
        by_state: dict[tuple[Branch, int], list[tuple[Branch, Entry]]] = {}
        for branch in self.branches:
            for place, entry in enumerate(branch.entries):
                if entry.sampled and place:
                    offset = branch.entries[place - 1].end
                    by_state.setdefault((branch.owner_of(offset), offset), []).append((branch, entry))
        return [
            (branch.id, entry.start, entry.end)
            for siblings in by_state.values()
            if any(entry.continued for _, entry in siblings)
            for branch, entry in siblings
            if not entry.continued
        ]

    # ---- where a history goes on ----------------------------------------------------------------

    def _plan(self, history: History, params: SamplingParams) -> _Plan:
        opening = history.messages[0]
        assert isinstance(opening, Opening), "a history begins with its opening"
        last = history.messages[len(history.messages) - 1]
        if isinstance(last, Opening | Answer):
            raise BadRequestError(
                "the last message must be the user's or a tool's",
                field="messages",
                received=type(last).__name__.lower(),
                fix="answers cannot be begun for the agent",
            )
        framing = self._framing(opening, history.keys[0])
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
        pieces = self._pieces(history, framing, source, num_common, num_kept, strip_before)
        kept_tokens = source.entries[num_kept - 1].end if source and num_kept else 0
        unclosed = bool(source and num_kept and not source.entries[num_kept - 1].closed)
        added = sum(len(piece.tokens) for piece in pieces)
        total = kept_tokens + unclosed + added + len(framing.answer_frame())
        return _Plan(source, num_common, num_kept, grows, relation, pieces, total, framing)

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
    ) -> tuple[_Piece, ...]:
        pieces: list[_Piece] = []
        first = not (source and num_kept and source.entries[num_kept - 1].end)
        for place in range(num_kept, len(history.messages)):
            message, key = history.messages[place], history.keys[place]
            if isinstance(message, Answer):
                known = (source, source.entries[place]) if source and place < num_common else None
                piece = self._answer_piece(message, key, framing, first, place < strip_before, known)
            else:
                piece = _Piece(Entry(message, key, 0), framing.given(message, first), _role(message))
            first = first and not len(piece.tokens)
            pieces.append(piece)
        return tuple(pieces)

    def _answer_piece(
        self,
        told: Answer,
        key: bytes,
        framing: Framing,
        first: bool,
        strip: bool,
        known: tuple[Branch, Entry] | None,
    ) -> _Piece:
        """An answer in a history, as given tokens: those once sampled where they are known."""
        origin = known or self._answers.get(key)
        served = origin[1].message if origin else None
        if origin and isinstance(served, Answer) and same_reasoning(served.reasoning, told.reasoning):
            return self._spliced(origin, key, framing, first, strip)
        given = replace(told, reasoning="") if strip else told
        entry = Entry(
            told,
            key,
            0,
            stripped=strip and bool(told.reasoning),
            reasons=bool(given.reasoning),
            num_frame=len(framing.answer_frame(first)),
        )
        return _Piece(entry, framing.given(given, first), "assistant")

    def _spliced(
        self, origin: tuple[Branch, Entry], key: bytes, framing: Framing, first: bool, strip: bool
    ) -> _Piece:
        branch, known = origin
        sampled = self._sampled_tokens(branch, known)
        reasons, stripped = known.reasons, known.stripped
        if stripped and not strip and key in self._answers:
            other, entry = self._answers[key]
            sampled, reasons, stripped = other.recording.tokens[entry.start : entry.end], entry.reasons, False
        if strip and reasons:
            sampled, reasons, stripped = framing.without_reasoning(sampled), False, True
        if not len(sampled) or int(sampled[-1]) != framing.renderer.end_token:
            sampled = np.concatenate([sampled, framing.end])
        frame = framing.answer_frame(first)
        entry = Entry(known.message, key, 0, stripped=stripped, reasons=reasons, num_frame=len(frame))
        return _Piece(entry, np.concatenate([frame, sampled]), "assistant")

    def _sampled_tokens(self, branch: Branch, entry: Entry) -> Tokens:
        """An answer's tokens without the frame before it."""
        return branch.recording.tokens[entry.start + entry.num_frame : entry.end]

    def _framing(self, opening: Opening, key: bytes) -> Framing:
        framing = self._framings.get(key)
        if framing is None:
            if len(self._framings) >= _MAX_FRAMINGS:
                self._framings.clear()
            framing = self._framings[key] = Framing(self.renderer_for(opening))
        return framing

    def _check_room(self, plan: _Plan) -> None:
        if not plan.grows and len(self.branches) >= self.limits.max_branches:
            raise BadRequestError(
                "the session has too many branches",
                field="messages",
                received=len(self.branches),
                fix="begin another session, or raise the server's limit",
            )
        if self.num_tokens + plan.context_tokens > self.limits.max_session_tokens:
            raise BadRequestError(
                "the session holds too many tokens",
                field="messages",
                received=self.num_tokens,
                fix="begin another session, or raise the server's limit",
            )

    # ---- changes --------------------------------------------------------------------------------

    def _new_branch(self, plan: _Plan, params: SamplingParams, history: History) -> Branch:
        number, opening = len(self.branches), history.messages[0]
        assert isinstance(opening, Opening)
        source, parent = plan.source, None
        if source is not None:
            offset = source.entries[plan.num_kept - 1].end if plan.num_kept else 0
            parent = (source.owner_of(offset), offset)
        elif self._last_answer is not None:
            parent = (self._last_answer[0], self._last_answer[1].end)
        agent_id = source.agent_id if source else opening.agent or (f"agent-{number}" if number else "main")
        branch = Branch(
            f"{self.trajectory_id}#{number}", number, agent_id, plan.relation, parent, plan.framing, params
        )
        if source is not None:
            branch.copy_from(source, plan.num_kept)
            self.counts.forks += plan.relation is Relation.FORK
            self.counts.rewrites += plan.relation is Relation.REWRITE
        self.counts.subagents += plan.relation is Relation.SUBAGENT
        self.branches.append(branch)
        return branch

    def _mark_continued(self, plan: _Plan) -> None:
        """Answers that a request told, wherever they were sampled: the client used them."""
        for piece in plan.pieces:
            if piece.entry.key in self._answers:
                self._answers[piece.entry.key][1].continued = True
        branch = plan.source
        offset = branch.entries[plan.num_common - 1].end if branch and plan.num_common else 0
        while branch is not None and offset:
            for entry in branch.entries:
                entry.continued = entry.continued or entry.end <= offset
            offset = min(offset, branch.copied)
            branch = branch.parent[0] if branch.parent else None


def _num_given(branch: Branch, entry: Entry) -> int:
    """Tokens at an answer's end that were given: the end token of one that was cut."""
    sampled = branch.recording.sampled[entry.start : entry.end]
    return int((~sampled).sum())


def _same_law(one: SamplingParams, other: SamplingParams) -> bool:
    return replace(one, max_tokens=1) == replace(other, max_tokens=1)


def _last_user(messages: Sequence[Message]) -> int:
    return max((place for place, one in enumerate(messages) if isinstance(one, UserWords)), default=0)


def _role(message: Message) -> str:
    if isinstance(message, Opening | SystemWords):
        return "system"
    return "tool" if isinstance(message, Results) else "user"


def _kept(branch: Branch, keep_routes: KeepRoutes | None) -> BlobRef | None:
    routes = branch.recording.routes() if keep_routes is not None else None
    return keep_routes(routes) if keep_routes is not None and routes is not None else None
