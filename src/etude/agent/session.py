"""The agent's session: a pure state machine from the user's words to the end.

        +--> Sample --(message)--> RunCalls --(results)--+--> Finished --(more words)--+
        |                                                |                             |
        +--------- the context has room -----------------+<----------------------------+
        |                                                |
        +-- Archive <--(summary)-- Sample <-- it is full-+

It keeps the tokens exactly as they were sampled and never tokenises them again. The same code runs in the
terminal, in the cloud and in rollouts; its driver does the sampling, runs the tools and keeps the
history of full contexts.
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
"""What calls are answered with that a stop of the session left without results."""


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
    """What the agent reads before the user's words; pieces may hold control tokens, as `Renderer.describe`
    gives them. None: the renderer's own system message, where it has one."""
    summary: SummaryPolicy | None = None
    """None: a full context ends the session."""
    contexts: list[Context] = field(init=False, default_factory=list[Context])
    turns: list[Turn] = field(init=False, default_factory=list[Turn])
    facts: SessionFacts = field(init=False, default_factory=SessionFacts)
    progress: Progress = field(init=False, default_factory=Progress)
    _action: Action | None = field(init=False, default=None)
    _said: list[str] = field(init=False)
    """All words of the user."""
    _request_tokens: int = field(init=False, default=0)
    """Length of the message that asks for a summary."""

    def __post_init__(self) -> None:
        self._said = [self.instruction]
        self.system = self.renderer.system if self.system is None else self.system
        if self.summary is not None:
            self._request_tokens = len(self.renderer.user_message(self.summary.request))
        self._open(self.instruction, Relation.ROOT, None)
        length, limit = self.recording.length, self.limits.max_tokens
        if length >= limit:
            raise too_small("the prompt fills the whole context", limit, length)
        if self.summary is not None:
            needed = self.summary.at_tokens + self.limits.max_message_tokens + self._budget.reserve
            if needed > limit:
                raise too_small("trigger, one message and a summary do not fit the context", limit, needed)

    @property
    def recording(self) -> Recording:
        """The present context's tokens."""
        return self.contexts[-1].recording

    @property
    def segment_id(self) -> str:
        """The id of the present context's segment."""
        return self.contexts[-1].id

    @property
    def num_tokens(self) -> int:
        """Tokens of all contexts together."""
        return sum(context.recording.length for context in self.contexts)

    @property
    def status(self) -> Status | None:
        """How the session ended; None while it goes on."""
        return self.progress.status

    @property
    def cause(self) -> str:
        """Which limit or error ended the session; empty for a plain finish."""
        return self.progress.cause

    def next_action(self) -> Action:
        """What to do next; the same until something is reported."""
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
        """The sampler holds nothing of this session: the next `Sample` sends every token again."""
        self.progress.known = 0
        self.progress.prefix_digest = None
        self.progress.streaming = False
        self._action = None

    def on_chunk(self, chunk: SampleChunk) -> None:
        """Takes sampled tokens. Those that come after the session was stopped are dropped.

        With finish `abort` the message stays open: the next `Sample` continues it.
        Raises SamplerError for a chunk whose parts do not fit each other.
        """
        progress = self.progress
        if progress.status is not None:
            return
        if progress.message_start is None:
            progress.message_start = self.recording.length
        if not progress.streaming and progress.known == 0:
            self.recording.forget_routes()
        progress.streaming = chunk.finish is None
        self.recording.sample(chunk)
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
        """Takes the results of the pending calls, in their order."""
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
            self._go_on([result.output for result in results])

    def on_archived(self, error: str = "") -> None:
        """The full context's history has been kept: a fresh context begins with the summary.

        `error`: why the history could not be kept; the agent reads it.
        """
        progress = self.progress
        if progress.status is not None:
            return
        assert progress.summary is not None, "no context to be archived"
        summary, progress.summary = progress.summary, None
        self._action = None
        words = self._continuation(summary, error)
        opening = 0 if words is None else len(self.renderer.prompt(words, self.system))
        if words is None or self._budget.is_spent(self.num_tokens + opening):
            self._end(Status.LIMIT, "tokens")
            return
        parent = (self.segment_id, self.recording.length)
        self._open(words, Relation.SUMMARY, parent)
        self.on_prefix_miss()

    def on_user(self, text: str, by_person: bool = True) -> None:
        """More words of the user, after the session has ended: it goes on, with its limits as they are. A
        person's may ask for one more turn where there is none left."""
        progress = self.progress
        assert progress.status is not None, "the session goes on"
        progress.status, progress.cause, progress.idle_turns = None, "", 0
        self.facts.finished = False
        self._action = None
        if not by_person and self._num_messages >= self.limits.max_turns:
            self._end(Status.LIMIT, "turns")
            return
        self._said.append(text)
        if progress.summarising or progress.summary is not None:
            return  # the context is full: the next one begins with all that was said
        if not self._message_is_closed() and len(self.renderer.closing):
            self.recording.give(self.renderer.closing, "assistant")
        spans = self.recording.turn_spans
        outputs: list[str] = []
        if self.turns and spans and spans[-1].role == "assistant":  # its results were not shown yet
            last = self.turns[-1]
            outputs = [result.output for result in last.results]
            outputs += [STOPPED] * (len(last.calls) - len(outputs))
        self._go_on(outputs, text)

    def stop(self, status: Status, cause: str) -> None:
        """Ends the session from outside; a session that has ended stays as it is."""
        if self.progress.status is None:
            self._end(status, cause)

    def segments(self, keep_routes: KeepRoutes | None = None) -> tuple[Segment, ...]:
        """The contexts as records, in their order; without `keep_routes` routes are left out."""
        return tuple(
            one.recording.segment(
                one.id,
                str(self.trajectory_id),
                self.params,
                self.renderer,
                keep_routes,
                relation=one.relation,
                parent=one.parent,
            )
            for one in self.contexts
        )

    def trajectory(
        self,
        keep_routes: KeepRoutes | None = None,
        reward: RewardBreakdown | None = None,
        attempt: int = 0,
        image_digest: str = "",
        timings: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """The session that has ended as a record, one segment for each context."""
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
        """What may be used from here on."""
        trigger = 0
        if self.summary is not None:
            trigger = self.summary.trigger(str(self.trajectory_id), len(self.contexts) - 1)
        return Budget(self.limits, self.summary, self._request_tokens, self.facts.num_summaries, trigger)

    def _open(self, words: str, relation: Relation, parent: tuple[str, int] | None) -> None:
        """Begins a context."""
        context = Context(
            f"{self.trajectory_id}#{len(self.contexts)}", words, relation=relation, parent=parent
        )
        opening = self.renderer.opening(self.system)
        if len(opening):
            context.recording.give(opening, "system")
        context.recording.give(self.renderer.request(words, opening), "user")
        self.contexts.append(context)

    def _continuation(self, summary: str, error: str) -> str | None:
        """The next context's words, the summary cut where it would leave no room for a message."""
        room, count = self._budget.opening_tokens, self.facts.num_summaries

        def fits(words: str) -> bool:
            return len(self.renderer.prompt(words, self.system)) < room

        return fit_continuation(self._said, summary, self.progress.todos, count, error, fits)

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
        said = self.renderer.read(message)
        if self.limits.words_end and not said.calls and said.text.strip():
            self._add_turn(message, ())
            self.facts.on_turn((), ())
            self._end(Status.DONE)
            return
        self.progress.pending = calls = admit(said.calls, self.limits.max_calls_per_turn)
        self._add_turn(message, calls)

    def _end_summary(self) -> None:
        """The summary has ended, or was cut: it is used as far as it goes."""
        message = self._close_message()
        self._add_turn(message, ())
        self.facts.num_summaries += 1
        text = self.turns[-1].text
        self.progress.summarising = False
        self.progress.summary = self.renderer.without_end(text).strip()

    def _cut_message(self) -> None:
        """The message ran into a limit: the session ends, its calls are not run."""
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

    def _go_on(self, outputs: Sequence[str], words: str | None = None) -> None:
        """Appends what the tools answered, then the user's words: see `observe`. The session ends where no
        room is left for a message."""
        budget = self._budget
        render = partial(follow, self.renderer, self.recording.tokens, self._answered())
        observation = observe(render, outputs, words, budget, self.recording.length)
        if observation is None or budget.is_spent(self.num_tokens + len(observation.tokens)):
            self._end(Status.LIMIT, "tokens")
            return
        self.progress.summarising = observation.asks_for_summary
        self.recording.give(observation.tokens, "tool" if outputs else "user")

    def _answered(self) -> list[str]:
        """The calls of the last turn by name and number, as the results name them of some families; none for
        others. Numbers go on from all calls that earlier messages hold, those included that were not run."""
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
