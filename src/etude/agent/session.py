"""The agent's session: a pure state machine from the user's first message to the end.

        +--> Sample --(message)--> RunCalls --(results)--+--> Finished --(user text)---+
        |                                                |                             |
        +--------- the context has room -----------------+<----------------------------+
        |                                                |
        +-- Archive <--(summary)-- Sample <-- it is full-+

It keeps the tokens exactly as they were sampled and never tokenises them again. The same code runs in the
terminal, in the cloud and in rollouts; its driver samples, runs the tools and archives full contexts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.admission import admit
from etude.agent.budget import Budget
from etude.agent.facts import SessionFacts
from etude.agent.limits import Progress, SessionLimits, too_small
from etude.agent.observing import follow, observe
from etude.agent.recording import Context, KeepRoutes, Recording
from etude.agent.summary import SummaryPolicy, fit_continuation, history_path, history_text
from etude.protocols import Action, Archive, Finished, RunCalls, Sample
from etude.records import (
    Relation,
    RewardBreakdown,
    SampleChunk,
    SamplingParams,
    Segment,
    Status,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
)
from etude.tokens.pieces import Piece
from etude.tokens.renderer import Renderer, number_calls

STOPPED = "error: stopped"
"""Result of calls that were pending when the session was stopped."""


@dataclass(slots=True, eq=False)
class AgentSession:
    """Implements `etude.protocols.Session`: one agent, a chain of contexts.

    Raises ConfigError if the limits leave no room for the prompt, a message and (with `summary`) a summary.
    """

    instruction: str
    renderer: Renderer
    trajectory_id: TrajectoryId
    limits: SessionLimits = field(default_factory=SessionLimits)
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str | tuple[Piece, ...] | None = None
    """The system message; pieces may hold control tokens, as `Renderer.describe` gives them. None: that of
    the renderer, if it has one."""
    summary: SummaryPolicy | None = None
    """None: a full context ends the session."""
    contexts: list[Context] = field(init=False, default_factory=list[Context])
    turns: list[Turn] = field(init=False, default_factory=list[Turn])
    facts: SessionFacts = field(init=False, default_factory=SessionFacts)
    progress: Progress = field(init=False, default_factory=Progress)
    _action: Action | None = field(init=False, default=None)
    _user_texts: list[str] = field(init=False)
    """All messages of the user."""
    _request_tokens: int = field(init=False, default=0)
    """Length of the message that asks for a summary."""

    def __post_init__(self) -> None:
        self._user_texts = [self.instruction]
        self.system = self.renderer.system if self.system is None else self.system
        if self.summary is not None:
            self._request_tokens = len(self.renderer.user_message(self.summary.request))
        self._open_context(self.instruction, Relation.ROOT, None)
        length, limit = self.recording.length, self.limits.max_tokens
        if length >= limit:
            raise too_small("the prompt does not fit the context", limit, length)
        if self.summary is not None:
            needed = self.summary.at_tokens + self.limits.max_message_tokens + self._budget.reserve
            if needed > limit:
                raise too_small("the summary limit, one message and a summary do not fit", limit, needed)

    @property
    def recording(self) -> Recording:
        """The current context's tokens."""
        return self.contexts[-1].recording

    @property
    def segment_id(self) -> str:
        """The id of the current context's segment."""
        return self.contexts[-1].id

    @property
    def num_tokens(self) -> int:
        """Tokens of all contexts together."""
        return sum(context.recording.length for context in self.contexts)

    @property
    def status(self) -> Status | None:
        """How the session ended; None while it runs."""
        return self.progress.status

    @property
    def cause(self) -> str:
        """Which limit or error ended the session; empty for a plain finish."""
        return self.progress.cause

    def next_action(self) -> Action:
        """What to do next; the same until one of the `on_` methods is called."""
        if self._action is None:
            progress = self.progress
            if progress.status is not None:
                self._action = Finished(progress.status, progress.cause)
            elif progress.pending:
                self._action = RunCalls(progress.pending)
            elif progress.summary is not None:
                self._action = self._archive()
            else:
                self._action = self._sample()
        return self._action

    def on_prefix_miss(self) -> None:
        """The sampler no longer holds this session's prefix: the next `Sample` sends every token again."""
        self.progress.known = 0
        self.progress.prefix_digest = None
        self.progress.streaming = False
        self._action = None

    def on_chunk(self, chunk: SampleChunk) -> None:
        """Appends sampled tokens. Those that arrive after the session was stopped are dropped.

        With finish `abort` the message stays open: the next `Sample` continues it.
        Raises SamplerError for a chunk whose parts do not fit each other.
        """
        progress = self.progress
        if progress.status is not None:
            return
        if progress.message_start is None:
            progress.message_start = self.recording.length
        if not progress.streaming and progress.known == 0:
            self.recording.invalidate_routes()
        progress.streaming = chunk.finish is None
        self.recording.append_sampled(chunk)
        self._action = None
        if chunk.finish is None:
            return
        progress.known = self.recording.length if chunk.prefix_digest else 0
        progress.prefix_digest = chunk.prefix_digest or None
        if chunk.finish == "abort":
            return
        if progress.summarising:
            self._end_summary()
        elif chunk.finish == "stop":
            self._end_message()
        else:
            self._cut_message()

    def on_results(self, results: Sequence[ToolResult]) -> None:
        """Adds the results of the pending calls, in their order."""
        progress = self.progress
        if progress.status is not None:
            return
        calls = progress.pending
        assert calls and len(results) == len(calls), "one result for each pending call"
        self.facts.on_turn(calls, results)
        self.turns[-1] = replace(self.turns[-1], results=tuple(results))
        for result in results:
            progress.todos = str(result.facts.get("todos", progress.todos))
        progress.pending = ()
        idle = all(call.error is not None for call in calls)
        progress.idle_turns = progress.idle_turns + 1 if idle else 0
        self._action = None
        if any(result.finished for result in results):
            self._end(Status.DONE)
        elif self._num_messages >= self.limits.max_turns:
            self._end(Status.LIMIT, "turns")
        elif progress.idle_turns == self.limits.max_idle_turns:
            self._end(Status.LIMIT, "no call")
        else:
            self._append_observation([result.output for result in results])

    def on_archived(self, error: str = "") -> None:
        """The full context has been archived: a new context begins with the summary.

        `error`: why it could not be archived; the agent reads it.
        """
        progress = self.progress
        if progress.status is not None:
            return
        assert progress.summary is not None, "no context to be archived"
        summary, progress.summary = progress.summary, None
        self._action = None
        text = self._continuation(summary, error)
        opening = 0 if text is None else len(self.renderer.prompt(text, self.system))
        if text is None or self._budget.is_spent(self.num_tokens + opening):
            self._end(Status.LIMIT, "tokens")
            return
        parent = (self.segment_id, self.recording.length)
        self._open_context(text, Relation.SUMMARY, parent)
        self.on_prefix_miss()

    def on_user(self, text: str, by_person: bool = True) -> None:
        """Continues an ended session with a user message, under the same limits. After a person's message
        one more turn is allowed even if none is left."""
        progress = self.progress
        assert progress.status is not None, "the session goes on"
        progress.status, progress.cause, progress.idle_turns = None, "", 0
        self.facts.finished = False
        self._action = None
        if not by_person and self._num_messages >= self.limits.max_turns:
            self._end(Status.LIMIT, "turns")
            return
        self._user_texts.append(text)
        if progress.summarising or progress.summary is not None:
            return  # the context is full: the next one begins with all user messages
        if not self._message_is_closed() and len(self.renderer.closing):
            self.recording.append_given(self.renderer.closing, "assistant")
        spans = self.recording.turn_spans
        outputs: list[str] = []
        if self.turns and spans and spans[-1].role == "assistant":  # its results were not shown yet
            last = self.turns[-1]
            outputs = [result.output for result in last.results]
            outputs += [STOPPED] * (len(last.calls) - len(outputs))
        self._append_observation(outputs, text)

    def stop(self, status: Status, cause: str) -> None:
        """Ends the session from outside; a session that has ended stays as it is."""
        if self.progress.status is None:
            self._end(status, cause)

    def segments(self, keep_routes: KeepRoutes | None = None) -> tuple[Segment, ...]:
        """The contexts as records, in their order; without `keep_routes` routes are left out."""
        return tuple(
            context.recording.segment(
                context.id,
                str(self.trajectory_id),
                self.params,
                self.renderer,
                keep_routes,
                relation=context.relation,
                parent=context.parent,
            )
            for context in self.contexts
        )

    def trajectory(
        self,
        keep_routes: KeepRoutes | None = None,
        reward: RewardBreakdown | None = None,
        attempt: int = 0,
        image_digest: str = "",
        timings: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """The ended session as a record, one segment per context."""
        assert self.progress.status is not None, "the session goes on"
        return Trajectory(
            id=self.trajectory_id,
            segments=self.segments(keep_routes),
            turns=tuple(self.turns),
            status=self.progress.status,
            cause=self.progress.cause,
            reward=reward,
            attempt=attempt,
            harness_digest=self.harness_digest,
            image_digest=image_digest,
            timings=dict(timings or {}),
            facts=self.facts.to_dict(),
        )

    @property
    def harness_digest(self) -> str:
        """BLAKE3 hex digest of template, grammar with its tools, limits, system message and summaries."""
        described = (self.renderer.template_digest, self.limits, self.system, self.summary)
        return blake3(repr(described).encode()).hexdigest()

    @property
    def _num_messages(self) -> int:
        return len(self.turns) - self.facts.num_summaries

    @property
    def _budget(self) -> Budget:
        """The budget as of the current context."""
        trigger = 0
        if self.summary is not None:
            trigger = self.summary.trigger(str(self.trajectory_id), len(self.contexts) - 1)
        return Budget(self.limits, self.summary, self._request_tokens, self.facts.num_summaries, trigger)

    def _open_context(self, text: str, relation: Relation, parent: tuple[str, int] | None) -> None:
        """Begins a context with the user message `text`."""
        context = Context(
            f"{self.trajectory_id}#{len(self.contexts)}", text, relation=relation, parent=parent
        )
        opening = self.renderer.opening(self.system)
        if len(opening):
            context.recording.append_given(opening, "system")
        context.recording.append_given(self.renderer.request(text, opening), "user")
        self.contexts.append(context)

    def _continuation(self, summary: str, error: str) -> str | None:
        """The next context's opening text, the summary cut if it would leave no room for a message."""
        room, count = self._budget.opening_tokens, self.facts.num_summaries

        def fits(text: str) -> bool:
            return len(self.renderer.prompt(text, self.system)) < room

        return fit_continuation(self._user_texts, summary, self.progress.todos, count, error, fits)

    def _sample(self) -> Sample | Finished:
        progress, length = self.progress, self.recording.length
        begun = 0 if progress.message_start is None else length - progress.message_start
        room = self._budget.message_room(
            length, begun, self.num_tokens, self.params.max_tokens, summarising=progress.summarising
        )
        if room <= 0:
            self._cut_message()
            return Finished(Status.LIMIT, progress.cause)
        return Sample(
            tokens=self.recording.tokens,
            known=progress.known,
            prefix_digest=progress.prefix_digest,
            params=replace(self.params, max_tokens=room),
            stop_tokens=self.renderer.end_tokens,
            segment_index=len(self.contexts) - 1,
            summarising=progress.summarising,
        )

    def _archive(self) -> Archive:
        number = len(self.contexts) - 1
        turns = [turn for turn in self.turns if turn.segment_id == self.segment_id]
        text = history_text(self.contexts[-1].opening, turns, self.renderer.without_end)
        return Archive(history_path(number), text)

    def _end_message(self) -> None:
        """Parses the message that has just ended; its calls await results."""
        message = self._close_message()
        parsed = self.renderer.read(message)
        if self.limits.words_end and not parsed.calls and parsed.text.strip():
            self._add_turn(message, ())
            self.facts.on_turn((), ())
            self._end(Status.DONE)
            return
        self.progress.pending = calls = admit(parsed.calls, self.limits.max_calls_per_turn)
        self._add_turn(message, calls)

    def _end_summary(self) -> None:
        """Ends a summary that is complete or was cut; a cut one is used as it is."""
        message = self._close_message()
        self._add_turn(message, ())
        self.facts.num_summaries += 1
        text = self.turns[-1].text
        self.progress.summarising = False
        self.progress.summary = self.renderer.without_end(text).strip()

    def _cut_message(self) -> None:
        """Ends the session because the message reached a limit; its calls are not run."""
        budget, summarising = self._budget, self.progress.summarising
        full = budget.is_spent(self.num_tokens) or budget.is_full(
            self.recording.length, summarising=summarising
        )
        if self.progress.message_start is not None and not self.progress.summarising:
            self.facts.on_turn((), ())
        self._end(Status.LIMIT, "tokens" if full else "message")

    def _close_message(self) -> NDArray[np.int32]:
        start = self.progress.message_start
        assert start is not None
        self.recording.end_message(start)
        self.progress.message_start = None
        return self.recording.tokens[start:]

    def _message_is_closed(self) -> bool:
        """Whether the last message of the context ends with its end token."""
        recording = self.recording
        spans = recording.turn_spans
        sampled = bool(spans) and spans[-1].role == "assistant"
        return not sampled or int(recording.tokens[-1]) in self.renderer.end_tokens

    def _add_turn(self, message: NDArray[np.int32], calls: tuple[ToolCall, ...]) -> None:
        end = self.recording.length
        turn = self.recording.turn(self.segment_id, end - len(message), end, self.renderer, calls)
        self.turns.append(turn)

    def _append_observation(self, outputs: Sequence[str], user_text: str | None = None) -> None:
        """Appends tool outputs, then the user's text: see `observe`. Ends the session if no room is left for
        a message."""
        budget = self._budget
        render = partial(follow, self.renderer, self.recording.tokens, self._numbered_calls())
        observation = observe(render, outputs, user_text, budget, self.recording.length)
        if observation is None or budget.is_spent(self.num_tokens + len(observation[0])):
            self._end(Status.LIMIT, "tokens")
            return
        tokens, self.progress.summarising = observation
        self.recording.append_given(tokens, "tool" if outputs else "user")

    def _numbered_calls(self) -> list[str]:
        """The last turn's calls by name and number, for model families whose results name their call; empty
        for others. Numbering continues over all calls of earlier messages, including those not run."""
        turns = [turn for turn in self.turns if turn.segment_id == self.segment_id]
        if not (turns and self.renderer.template.result_named):
            return []
        messages = (self.recording.tokens[turn.start : turn.end] for turn in turns[:-1])
        num_before = sum(len(self.renderer.parse(message)) for message in messages)
        return number_calls([call.name for call in turns[-1].calls], num_before)

    def _end(self, status: Status, cause: str = "") -> None:
        if self.progress.message_start is not None:
            if self.progress.summarising:
                self._end_summary()
            else:
                self._add_turn(self._close_message(), ())
        self.progress.pending = ()
        self.progress.status = status
        self.progress.cause = cause
        self._action = None
