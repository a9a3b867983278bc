"""The session map: maps growing conversations to token sequences. Pure: no I/O, no clock.

A request contains a whole history. It continues the branch with which it has the longest common prefix: those
tokens stay as they were given and sampled, only new messages are rendered.

    the history is known and ends here     the branch grows
    it was known further on                fork: a retry, or a step back; the same state is sampled again
    its branch is busy sampling            fork: requests at the same time
    it differs from some message on        rewrite: compaction, an edited or truncated history
    another system message or tools, or    subagent: a conversation of its own (with the same declared agent
      another first message                a rewrite)

A fork and a rewrite copy the tokens up to the last common message, and the copy is not marked as sampled:
each sampled token is `sampled` in exactly one branch. An answer that was sampled in this session and appears
at another point of a history is given with its sampled tokens; any other answer is rendered, and given.

With `keep_thinking` reasoning stays where it was sampled. Without it a history is rendered like Qwen3's
template does: answers before the user's last message lose their reasoning, so each such turn is a rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from etude.agent.recording import KeepRoutes
from etude.environment.recording.branches import (
    Branch,
    Entry,
    History,
    Plan,
    Planner,
    RendererFor,
    encode_messages,
)
from etude.errors import SamplerError
from etude.kit.tasks import LARGE
from etude.records import Relation, SampleChunk, SamplingParams, Segment, ToolResult, Turn
from etude.tokens.chat.errors import BadRequestError, ContextLengthError
from etude.tokens.chat.framing import Tokens
from etude.tokens.chat.messages import (
    Answer,
    Message,
    Opening,
    Results,
    content_key,
    least_tokens,
    num_characters,
)


@dataclass(frozen=True, slots=True)
class MapLimits:
    """Limits of one session."""

    max_context_tokens: int = 32768
    """For one branch, answers included."""
    max_branches: int = 512
    max_session_tokens: int = 1 << 24
    """For all branches together, copies included."""


@dataclass(slots=True, eq=False)
class Generation:
    """One answer to be sampled at the end of its branch."""

    branch: Branch
    params: SamplingParams
    """With `max_tokens` limited to the remaining context."""

    @property
    def tokens(self) -> Tokens:
        """The whole context."""
        return self.branch.recording.tokens


@dataclass(slots=True)
class Counts:
    """Counters of a session's requests."""

    requests: int = 0
    continued: int = 0
    forks: int = 0
    rewrites: int = 0
    subagents: int = 0
    failed: int = 0
    """Answers that the sampler did not finish: they are discarded."""
    aborted: int = 0
    """Answers whose client disconnected: tokens so far are kept, unless the sampler did not end the
    request."""
    malformed_calls: int = 0


@dataclass(slots=True, eq=False)
class SessionMap:
    """All branches of one recorded session. One caller; several answers may be sampled concurrently."""

    trajectory_id: str
    renderer_for: RendererFor
    limits: MapLimits = field(default_factory=MapLimits)
    keep_thinking: bool = True
    counts: Counts = field(init=False, default_factory=Counts)
    _planner: Planner = field(init=False)
    _last_answer: tuple[Branch, Entry] | None = field(init=False, default=None)
    _clock: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._planner = Planner(self.renderer_for, self.keep_thinking)

    @property
    def branches(self) -> list[Branch]:
        """In the order in which they began."""
        return self._planner.branches

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches together, copies included."""
        return sum(branch.recording.length for branch in self.branches)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that a policy sampled."""
        return sum(int(branch.recording.sampled.sum()) for branch in self.branches)

    def encoding(self, messages: Sequence[Message]) -> Callable[[], History] | None:
        """A function that encodes the new messages of a history, if they are long, and returns the history
        for `begin` or `measure`; it may run in a thread. None: they are short.

        Raises ContextLengthError for a history that is too long whatever its encoding.
        """
        ContextLengthError.check(len(messages) - 1, self.limits.max_context_tokens)
        size = num_characters(messages)
        if size < LARGE:
            return None
        opening = messages[0]
        assert isinstance(opening, Opening), "a history begins with its opening"
        framing = self._planner.framing(opening, content_key(opening))
        least = least_tokens(messages, framing.renderer.tokenizer.longest_bytes)
        ContextLengthError.check(least, self.limits.max_context_tokens)
        history = History.of(messages)
        places = self._planner.unseen(history)
        if num_characters([messages[place] for place in places]) < LARGE:
            return None
        return lambda: encode_messages(history, places, framing)

    def measure(self, messages: Sequence[Message] | History, params: SamplingParams) -> int:
        """Number of context tokens that a request with these messages would have; changes nothing."""
        return self._planner.plan(History.of(messages), params).context_tokens

    def begin(self, messages: Sequence[Message] | History, params: SamplingParams) -> Generation:
        """Finds the branch that a history (its opening first) continues, and adds its new messages to it.

        Raises ContextLengthError and BadRequestError; then nothing has changed.
        """
        history = History.of(messages)
        plan = self._planner.plan(history, params)
        room = self.limits.max_context_tokens - plan.context_tokens
        if room <= 0:
            raise ContextLengthError(plan.context_tokens, self.limits.max_context_tokens)
        self._check_room(plan)
        branch = plan.source if plan.grows and plan.source else self._new_branch(plan, params, history)
        self._mark_continued(plan)
        for entry, tokens in plan.pieces:
            branch.append(entry, tokens)
        branch.close_answer()
        if not branch.framed:
            role = branch.recording.turn_spans[-1].role
            branch.recording.append_given(branch.framing.answer_frame(branch.recording.length == 0), role)
            branch.framed = True
        self._clock += 1
        branch.busy, branch.last_used = True, self._clock
        self.counts.requests += 1
        self.counts.continued += plan.grows
        return Generation(branch, replace(params, max_tokens=min(params.max_tokens, room)))

    def commit(self, generation: Generation, chunks: Iterable[SampleChunk], answer: Answer) -> Entry | None:
        """Adds the sampled tokens and the answer that was served for them; returns None if there are no
        tokens.

        Raises SamplerError for inconsistent chunks; then all are discarded.
        """
        branch = generation.branch
        branch.busy = False
        if branch.known == 0:
            branch.recording.invalidate_routes()
        start = branch.recording.length
        try:
            for chunk in chunks:
                branch.recording.append_sampled(chunk)
        except SamplerError:
            branch.recording.truncate(start)
            raise
        end = branch.recording.length
        if end == start:
            return None
        branch.recording.end_message(start)
        branch.framed = False
        closed = int(branch.recording.tokens[-1]) in branch.framing.renderer.end_tokens
        entry = Entry(
            answer,
            content_key(answer, branch.framing.opening.tools),
            end,
            start,
            sampled=True,
            reasons=bool(answer.reasoning.strip()),
            closed=closed,
        )
        branch.entries.append(entry)
        self._planner.answers[entry.key] = self._last_answer = (branch, entry)
        return entry

    def fail(self, generation: Generation, aborted: bool = False) -> None:
        """Discards the answer. `aborted`: the client had disconnected; else the sampler failed."""
        generation.branch.busy = False
        generation.branch.known, generation.branch.prefix_digest = 0, None
        self.counts.aborted += aborted
        self.counts.failed += not aborted

    def segments(self, keep_routes: KeepRoutes | None = None) -> tuple[Segment, ...]:
        """The branches as records, in the order in which they began, without those on which, and on whose
        descendants, nothing was sampled."""
        wanted: set[Branch] = set()
        for branch in self.branches:
            if not any(entry.sampled for entry in branch.entries):
                continue
            found: Branch | None = branch
            while found is not None and found not in wanted:
                wanted.add(found)
                found = found.parent[0] if found.parent else None
        return tuple(
            branch.recording.segment(
                branch.id,
                self.trajectory_id,
                branch.params,
                branch.framing.renderer,
                keep_routes,
                agent_id=branch.agent_id,
                parent=(branch.parent[0].id, branch.parent[1]) if branch.parent else None,
                relation=branch.relation,
            )
            for branch in self.branches
            if branch in wanted
        )

    def turns(self) -> tuple[Turn, ...]:
        """Each sampled answer with the results that the client reported, branch by branch."""
        turns: list[Turn] = []
        for branch in self.branches:
            recording, renderer = branch.recording, branch.framing.renderer
            for place, entry in enumerate(branch.entries):
                if not entry.sampled:
                    continue
                after = branch.entries[place + 1].message if place + 1 < len(branch.entries) else None
                outputs = after.outputs if isinstance(after, Results) else ()
                # Without the end token that was added to a cut answer.
                end = entry.start + int(recording.sampled[entry.start : entry.end].sum())
                calls = tuple(renderer.parse(recording.tokens[entry.start : end]))
                results = tuple(map(ToolResult, outputs))
                turns.append(recording.turn(branch.id, entry.start, end, renderer, calls, results))
        return tuple(turns)

    def abandoned(self) -> list[tuple[str, int, int]]:
        """Sampled answers (segment id, first token, one past the last) that no request continued, although
        one continued another answer to the same history."""
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

    def _check_room(self, plan: Plan) -> None:
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

    def _new_branch(self, plan: Plan, params: SamplingParams, history: History) -> Branch:
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

    def _mark_continued(self, plan: Plan) -> None:
        """Marks answers that a request contains, wherever they were sampled: the client used them."""
        for entry, _ in plan.pieces:
            if entry.key in self._planner.answers:
                self._planner.answers[entry.key][1].continued = True
        branch = plan.source
        offset = branch.entries[plan.num_common - 1].end if branch and plan.num_common else 0
        while branch is not None and offset:
            for entry in branch.entries:
                entry.continued = entry.continued or entry.end <= offset
            offset = min(offset, branch.copied)
            branch = branch.parent[0] if branch.parent else None
