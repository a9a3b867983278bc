"""Drafts from multi-token prediction layers (DeepSeek-V3, 2024) on top of the model.

    hidden states ──draft_after_step()──> draft layers over their own keys ──> drafts behind the tokens
                                                                                   |
    next step <──────────────── verifies them (`stepping`) <─────── draft() <──────┘

A draft layer reads, at slot i, the model's hidden state of position i and the token at i + 1. Its keys lie
in slot i of the same pages that hold the model's, so they are shared, copied, preempted and freed with
those. What a slot holds may come from another session's next token (at the end of a shared page) or from
weights before the last update: that lowers acceptance but not correctness, as every draft is verified.

Drafts are drawn with the noise that will draw the token itself. Where the draft's distribution is the
model's, so is the token; a guess of the likeliest token would agree with a sampled one less often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import ConfigError
from etude.inference.cache import PAGE_TOKENS, StepRows
from etude.inference.sampling import uniforms
from etude.inference.scheduler import StepPlan
from etude.inference.sequences import Sequences
from etude.inference.speculation import CarriedStates, NgramLookup
from etude.inference.weights import Runner
from etude.model import DraftLayers
from etude.model.huggingface import load_draft_layers


@dataclass(frozen=True, slots=True, eq=False)
class MtpDrafts:
    """Configuration of drafting by MTP layers; an engine copies the layers."""

    layers: DraftLayers
    num_drafts: int = 1
    """Most tokens drafted at once. Beyond the number of layers the last one is fed its own output."""
    adaptive: bool = True
    """Whether sessions where drafts do not pay continue without them."""

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"MtpDrafts: needs num_drafts >= 1, received {self.num_drafts}")


def choose_drafts(
    kind: str, num_drafts: int, checkpoint: str | Path | None
) -> NgramLookup | MtpDrafts | None:
    """The drafter that a configuration names, for up to `num_drafts` tokens; None for 0. `kind`: `ngram` or
    `mtp`. `checkpoint`: a Hugging Face directory whose draft layers are read for `mtp`. Raises ConfigError
    where it has none, CheckpointError where they are damaged."""
    if not num_drafts:
        return None
    if kind == "ngram":
        return NgramLookup(num_drafts)
    layers = None if checkpoint is None else load_draft_layers(Path(checkpoint))
    if layers is None:
        raise ConfigError(
            "there are no layers for multi-token prediction",
            field="engine.drafts",
            received="mtp" if checkpoint is None else f"mtp, with {checkpoint}",
            fix='name a checkpoint that has them (num_nextn_predict_layers), or set it to "ngram"',
        )
    return MtpDrafts(layers, num_drafts)


@dataclass(frozen=True, slots=True, eq=False)
class _Drafting:
    """The N sessions of a step that get drafts."""

    rows: NDArray[np.int64]
    """[N] rows of `Sequences`."""
    rooms: NDArray[np.int64]
    """[N] most drafts of each, at least 1."""
    last: NDArray[np.int64]
    """[N] row of the hidden states from which each is drafted."""

    def with_room(self, count: int) -> NDArray[np.int64]:
        """Indices of the sessions that take more than `count` drafts."""
        return np.flatnonzero(self.rooms > count)


class MtpDrafter:
    """Implements Drafter for the sessions of one engine, which calls `draft_after_step` after each step."""

    def __init__(self, sequences: Sequences, num_layers: int, num_drafts: int) -> None:
        num_rows, self._sequences = sequences.num_rows, sequences
        self._depth = min(num_layers, num_drafts)
        """Layers that run over every position; the last of them is applied repeatedly."""
        self._counts = np.zeros(num_rows, dtype=np.int64)
        """Drafts behind each row's tokens; valid while the row has the length and request recorded below."""
        self._lengths = np.full(num_rows, -1, dtype=np.int64)
        self._arrivals = np.zeros(num_rows, dtype=np.int64)
        self._carried: CarriedStates | None = None

    def draft(self, row: int, tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """See Drafter: those that `draft_after_step` put behind the session's tokens."""
        sequences, length = self._sequences, len(tokens)
        if self._lengths[row] != length or self._arrivals[row] != sequences.arrival[row]:
            return tokens[:0]
        return sequences.tokens[row, length : length + min(most, int(self._counts[row]))]

    @torch.no_grad()
    def draft_after_step(
        self, plan: StepPlan, hidden: Tensor, runner: Runner, wanted: NDArray[np.int64]
    ) -> None:
        """Computes the draft layers for all valid positions of a step, and up to `wanted` [S] drafts for its
        members that continue sampling; does nothing if all of `wanted` are 0. `hidden` [T, width]: the
        step's, of the weights in `runner`."""
        if not wanted.any():
            return
        self._reset_older_requests(plan.members)
        rows, hidden = self._valid_rows(plan, hidden)
        drafting = self._choose(plan, rows, wanted)
        hidden = self._compute_positions(plan, rows, hidden, drafting, runner)
        first = drafting.with_room(self._depth - 1)
        reached = hidden[torch.from_numpy(drafting.last[first]).to(hidden.device)]
        for number in range(self._depth, int(drafting.rooms.max(initial=0))):
            still = drafting.with_room(number)
            before = drafting.with_room(number - 1)
            reached = reached[torch.from_numpy(np.searchsorted(before, still)).to(hidden.device)]
            reached = self._repeat(number, drafting.rows[still], reached, runner)
        self.record_drafts(drafting.rows, drafting.rooms)

    def begin_run(self, rows: NDArray[np.int64], like: Tensor) -> tuple[NDArray[np.int64], CarriedStates]:
        """[N] drafts that already follow the tokens of `rows`, and the states that native code carries from
        step to step. `like`: a tensor of the states' type and width."""
        self._reset_older_requests(rows)
        ready = np.where(self._lengths[rows] == self._sequences.length[rows], self._counts[rows], 0)
        return ready, self._carried_states(like)

    def record_drafts(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Records that `counts` [N] drafts follow the current tokens of `rows` [N]."""
        self._counts[rows] = counts
        self._lengths[rows] = self._sequences.length[rows]

    def _reset_older_requests(self, rows: NDArray[np.int64]) -> None:
        """Drops drafts and states of `rows` [N] that belong to an earlier request."""
        arrivals = self._sequences.arrival
        stale = rows[self._arrivals[rows] != arrivals[rows]]
        self._arrivals[stale] = arrivals[stale]
        self._lengths[stale] = -1
        if self._carried is not None:
            self._carried.ends[stale] = -1

    def _carried_states(self, like: Tensor) -> CarriedStates:
        if self._carried is None:
            num_rows = len(self._lengths)
            hidden = like.new_empty((num_rows, self._depth - 1, like.shape[-1]))
            counts, ends = np.zeros(num_rows, dtype=np.int64), np.full(num_rows, -1, dtype=np.int64)
            self._carried = CarriedStates(self._depth, hidden, counts, ends)
        return self._carried

    def _valid_rows(self, plan: StepPlan, hidden: Tensor) -> tuple[StepRows, Tensor]:
        """The valid positions of the step, as slots, and their hidden states."""
        starts, firsts = plan.rows.starts, np.cumsum(plan.rows.counts) - plan.rows.counts
        counts = self._sequences.computed[plan.members] - starts
        source = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        if len(source) < len(hidden):
            hidden = hidden[torch.from_numpy(source).to(hidden.device)]
        if self._depth > 1:
            starts, counts, hidden = self._carry(plan.members, starts, counts, hidden)
        nothing = np.empty(0, dtype=np.int64)
        return StepRows.plan(nothing, plan.rows.tables, counts, starts), hidden

    def _carry(
        self,
        members: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        hidden: Tensor,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor]:
        """Prepends each member's last slots of the previous step, which further layers computed with drafts
        as tokens, so that they are computed again. Stores this step's last slots in their place."""
        back, carried = np.zeros_like(counts), self._carried_states(hidden)
        parts: list[Tensor] = []
        own = zip(members.tolist(), (starts + counts).tolist(), hidden.split(counts.tolist()), strict=True)
        for number, (row, end, part) in enumerate(own):
            if carried.ends[row] == starts[number]:
                back[number] = carried.counts[row]
                part = torch.cat((carried.hidden[row, : back[number]], part))
            kept = part[1 - self._depth :]
            carried.hidden[row, : len(kept)] = kept
            carried.counts[row], carried.ends[row] = len(kept), end
            parts.append(part)
        return starts - back, counts + back, torch.cat(parts)

    def _choose(self, plan: StepPlan, rows: StepRows, wanted: NDArray[np.int64]) -> _Drafting:
        """The members whose tokens are all computed but the last, and that have room for drafts."""
        sequences, members = self._sequences, plan.members
        lengths = sequences.length[members]
        ready = sequences.running[members] & (lengths == sequences.computed[members] + 1)
        rooms = np.minimum(wanted, sequences.draft_room(members))
        # Repetitions write slots from that of the last token on, whose page may not be allocated yet.
        slots_left = sequences.num_pages[members] * PAGE_TOKENS - (lengths - 1)
        rooms = np.minimum(rooms, self._depth + slots_left)
        chosen = np.flatnonzero(ready & (rooms > 0))
        return _Drafting(members[chosen], rooms[chosen], (np.cumsum(rows.counts) - 1)[chosen])

    def _compute_positions(
        self, plan: StepPlan, rows: StepRows, hidden: Tensor, drafting: _Drafting, runner: Runner
    ) -> Tensor:
        """Runs each layer over all `rows` and drafts one token with it; the last layer's output."""
        sequences, owners = self._sequences, plan.members[rows.sequence]
        for layer in range(self._depth):
            places = np.minimum(rows.positions + 1 + layer, sequences.max_tokens - 1)
            given = replace(rows, tokens=sequences.tokens[owners, places].astype(np.int64))
            hidden = runner.compute.draft_layer(layer, given, hidden)
            some = drafting.with_room(layer)
            last = torch.from_numpy(drafting.last[some]).to(hidden.device)
            self._draw(layer, drafting.rows[some], hidden[last], runner)
        return hidden

    def _repeat(self, number: int, rows: NDArray[np.int64], hidden: Tensor, runner: Runner) -> Tensor:
        """Feeds the last layer its own output `hidden` [N, width] and the previous draft; samples the next
        one. The slots that it writes are computed again once their tokens are final."""
        sequences = self._sequences
        slots = sequences.length[rows] - 1 + number - self._depth
        tables = sequences.tables[rows, : int(slots.max()) // PAGE_TOKENS + 1]
        tokens = sequences.tokens[rows, sequences.length[rows] + number - 1].astype(np.int64)
        step = StepRows.plan(tokens, tables, np.ones_like(slots), slots)
        hidden = runner.compute.draft_layer(self._depth - 1, step, hidden)
        self._draw(number, rows, hidden, runner)
        return hidden

    def _draw(self, number: int, rows: NDArray[np.int64], hidden: Tensor, runner: Runner) -> None:
        """Samples the `number`-th draft of `rows` [N] from hidden [N, width]; appends it to their tokens."""
        if not len(rows):
            return
        sequences = self._sequences
        places = sequences.length[rows] + number
        drawn, _ = runner.compute.sample(
            hidden, sequences.params(rows), uniforms(sequences.key[rows], places)
        )
        sequences.tokens[rows, places] = drawn.numpy()
