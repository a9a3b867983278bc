"""Targeted textual feedback: the policy with a hint about its mistake is distilled into the policy without.

    student    prefix ... <results>               | <message with the fault>      as it was sampled
    teacher    prefix ... <results> <user: hint>  | <message with the fault>      same weights, no gradient
                                                    ^ KL(teacher || student) on these sampled tokens only

A scalar reward at a session's end carries little information about one bad call in its middle; a sentence
about that call names the mistake. The hint is never sampled from nor trained on: only the policy without it
is trained (context distillation, Snell et al. 2022, at one turn). The renderer of the sessions encodes the
hint; the message keeps the tokens that were sampled.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.algorithms.signal import graded_members
from etude.config import FeedbackConfig
from etude.model import LanguageModel
from etude.model.scoring import PackedSequences, device_of
from etude.records import Group, Segment, ToolCall, ToolErrorClass, ToolResult, Trajectory, Turn
from etude.tokens.renderer import Renderer
from etude.training.packing import pack_sequences
from etude.training.parallel.ranks import Ranks

_CHUNK_ROWS = 256
"""Rows whose distributions over the vocabulary are in memory at once."""
_MAX_QUOTED = 200
"""Characters of a tool's answer that a hint repeats."""


FindHints = Callable[[Trajectory], dict[int, str]]
"""Returns a hint about each faulty turn of a trajectory, by index into its turns, in their order."""

HINTED_ERRORS = frozenset(
    {
        ToolErrorClass.MALFORMED,
        ToolErrorClass.INVALID_ARGUMENTS,
        ToolErrorClass.UNEXPECTED_ENVIRONMENT,
        ToolErrorClass.TIMEOUT,
    }
)
"""Errors that the agent caused: those of the infrastructure and of the user give no hint."""


def tool_error_hints(trajectory: Trajectory) -> dict[int, str]:
    """Hints from the tools' own error messages, by turn: malformed calls, and HINTED_ERRORS."""
    return {number: text for number, turn in enumerate(trajectory.turns) if (text := _hint(turn))}


def _hint(turn: Turn) -> str:
    """All errors of a turn, each once; empty if there are none."""
    calls = itertools.zip_longest(turn.calls, turn.results[: len(turn.calls)])
    return "\n".join(filter(None, dict.fromkeys(_fault(call, result) for call, result in calls)))


def _fault(call: ToolCall, result: ToolResult | None) -> str:
    if call.error is not None:
        return f"A call would be malformed: {_quoted(call.error)}"
    if result is None or result.error not in HINTED_ERRORS:
        return ""
    return f"{call.name} would fail ({result.error}): {_quoted(result.output)}"


def _quoted(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_QUOTED else f"{flat[:_MAX_QUOTED]}..."


class Unhinted(StrEnum):
    """Why a hint was not used. Metrics count them as `unhinted_<reason>`."""

    UNSAMPLED = "unsampled"
    """No token of the turn was sampled."""
    FRAME = "frame"
    """The turn does not begin where the renderer opens an agent's message."""
    TOO_LONG = "too_long"
    """With the hint, the turn does not fit into the model's window."""


@dataclass(frozen=True, slots=True, eq=False)
class FeedbackExample:
    """One faulty turn, with and without its hint. Both sequences end with the turn's tokens."""

    student: NDArray[np.int32]
    """[S] the segment up to the turn's end."""
    teacher: NDArray[np.int32]
    """[S + hint] the same with the hint before the turn."""
    taught: NDArray[np.bool_]
    """[turn] True for sampled tokens: where the divergence applies."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the divergence."""
        return int(self.taught.sum())


class Feedback:
    """Makes FeedbackExamples of the faulty turns in a step's trajectories."""

    def __init__(self, find_hints: FindHints, renderer: Renderer, config: FeedbackConfig) -> None:
        self._find_hints, self._renderer, self._config = find_hints, renderer, config
        self.weight = config.weight
        """Factor on the mean divergence per token."""
        template = renderer.template
        self._opening = renderer.encode((*template.after_end, *template.prompt), template.end)

    def examples(
        self, groups: Sequence[Group], max_positions: int
    ) -> tuple[list[list[FeedbackExample]], Counter[Unhinted]]:
        """Per group, examples from its graded members; and the number of hints not used, by reason."""
        counts: Counter[Unhinted] = Counter()
        found: list[list[FeedbackExample]] = []
        for group in groups:
            members = [member for member, _ in graded_members(group)]
            made = [item for member in members for item in self._examples(member, max_positions)]
            counts.update(item for item in made if isinstance(item, Unhinted))
            found.append([item for item in made if isinstance(item, FeedbackExample)])
        return found, counts

    def _examples(self, trajectory: Trajectory, max_positions: int) -> list[FeedbackExample | Unhinted]:
        segments = {segment.id: segment for segment in trajectory.segments}
        hints = [(trajectory.turns[number], text) for number, text in self._find_hints(trajectory).items()]
        return [
            self._example(segments[turn.segment_id], turn, text, max_positions)
            for turn, text in hints[: self._config.max_hints_per_trajectory]
        ]

    def _example(
        self, segment: Segment, turn: Turn, text: str, max_positions: int
    ) -> FeedbackExample | Unhinted:
        taught = segment.sampled[turn.start : turn.end]
        if not taught.any():
            return Unhinted.UNSAMPLED
        prefix, opening = segment.tokens[: turn.start], self._opening
        if len(prefix) < len(opening) or not np.array_equal(prefix[len(prefix) - len(opening) :], opening):
            return Unhinted.FRAME
        words = self._renderer.user_message(text)
        kept = prefix[: len(prefix) - len(opening)]
        teacher = np.concatenate([kept, words, segment.tokens[turn.start : turn.end]])
        if len(teacher) > max_positions:
            return Unhinted.TOO_LONG
        return FeedbackExample(segment.tokens[: turn.end], teacher.astype(np.int32), taught)


class StepFeedback:
    """The feedback examples of one step, distributed over its updates, and their loss."""

    def __init__(
        self, feedback: Feedback | None, groups: Sequence[Group], max_positions: int, num_updates: int
    ) -> None:
        """Without `feedback`, or in a step without updates, there are no examples."""
        self.examples: list[list[FeedbackExample]] = [[] for _ in range(num_updates)]
        """By update."""
        self._weight = 0.0 if feedback is None else feedback.weight
        self._unhinted: Counter[Unhinted] = Counter()
        self._total = torch.zeros(())
        if feedback is not None and num_updates:
            by_group, self._unhinted = feedback.examples(groups, max_positions)
            for number, examples in enumerate(by_group):
                self.examples[number % num_updates] += examples

    def add_gradients(
        self, update: int, model: LanguageModel, ranks: Ranks, micro_batch_tokens: int, temperature: float
    ) -> None:
        """Adds the gradient of weight * the mean divergence per token of an update's examples."""
        examples = self.examples[update]
        if not examples:
            return
        num_tokens = sum(example.num_tokens for example in examples)
        lengths = [len(example.teacher) for example in examples]
        plan = pack_sequences(lengths, micro_batch_tokens, ranks.world_size)
        for share in ranks.share(plan):
            divergence = feedback_divergence(model, [examples[i] for i in share.indices], temperature)
            (share.weight * self._weight / num_tokens * divergence).backward()
            self._total += share.weight * divergence.detach().cpu()

    def summary(self, all_reduce_: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Metrics of the step; empty if there were no hints."""
        result = {f"unhinted_{reason}": float(count) for reason, count in sorted(self._unhinted.items())}
        num_tokens = sum(example.num_tokens for examples in self.examples for example in examples)
        if num_tokens:
            total = float(all_reduce_(self._total))
            result |= {"feedback_tokens": float(num_tokens), "feedback_kl": total / num_tokens}
        return result


def open_feedback(config: FeedbackConfig, renderer: Renderer) -> Feedback | None:
    """The feedback that a configuration asks for; None if it is off."""
    return Feedback(tool_error_hints, renderer, config) if config.weight > 0 else None


def feedback_divergence(
    model: LanguageModel, examples: Sequence[FeedbackExample], temperature: float
) -> Tensor:
    """KL(teacher || student) in nats, summed over the taught tokens of the examples; differentiable.

    Over the whole vocabulary, not the sampled tokens alone. Both sides are the current weights at the
    sampling temperature, and both route natively, so that they differ only in the hint.
    """
    student = _states(model, [example.student for example in examples], examples)
    with torch.no_grad():
        teacher = _states(model, [example.teacher for example in examples], examples)
    total = student.new_zeros(())
    for rows, target in zip(student.split(_CHUNK_ROWS), teacher.split(_CHUNK_ROWS), strict=True):
        total = total + checkpoint(_divergence, model, rows, target, temperature, use_reentrant=False)
    return total


def _divergence(model: LanguageModel, rows: Tensor, target: Tensor, temperature: float) -> Tensor:
    """KL between the distributions after final states [n, width]; recomputed in the backward pass."""
    learned = model.ops.log_softmax(model.logits(rows) / temperature)
    with torch.no_grad():
        advised = model.ops.log_softmax(model.logits(target) / temperature)
    return (advised.exp() * (advised - learned)).sum()


def _states(
    model: LanguageModel, sequences: Sequence[NDArray[np.int32]], examples: Sequence[FeedbackExample]
) -> Tensor:
    """Final hidden states [N, width] before each taught token, in the order of the examples."""
    batch = PackedSequences.pack(sequences, device_of(model))
    starts = dict(zip(batch.order, batch.starts, strict=True))
    rows = [
        starts[i] + len(sequences[i]) - len(example.taught) + example.taught.nonzero()[0] - 1
        for i, example in enumerate(examples)
    ]
    wanted = torch.from_numpy(np.concatenate(rows)).to(batch.tokens.device)
    attention = model.ops.packed_attention(batch.attention)
    return model(batch.tokens, batch.positions, attention, wanted=wanted)
