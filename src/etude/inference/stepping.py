"""Executes a step plan: forward pass, sampling with verification of drafts, answers.

A decoding row computes its last token and any drafts behind it. At each of these positions the token is
sampled that would be sampled without drafts: from the same distribution, with the noise of (key, position).
The first is always valid; each following one is valid if the draft before it equals the token sampled there.
So drafts save steps and change no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import PAGE_TOKENS
from etude.inference.mtp import MtpDrafter
from etude.inference.native import NativeForward
from etude.inference.sampling import Alternatives, uniforms
from etude.inference.scheduler import Scheduler, StepPlan
from etude.inference.sequences import Answer, Sequences
from etude.inference.speculation import CarriedStates, NgramLookup
from etude.inference.weights import DoubleWeights
from etude.records import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The N positions at which a step samples, for S sessions; those of one session are consecutive."""

    sessions: NDArray[np.int64]
    """[S] rows of `Sequences`."""
    counts: NDArray[np.int64]
    """[S] draws of each, at least 1."""
    owners: NDArray[np.int64]
    """[N] rows of `Sequences`."""
    places: NDArray[np.int64]
    """[N] position of each sampled token."""
    hidden_rows: NDArray[np.int64]
    """[N] row of the step whose hidden state each is sampled from."""

    @staticmethod
    def of(plan: StepPlan, sequences: Sequences) -> Draws:
        """All of the decoding members' rows, and the last of each prompt that is complete now."""
        counts = plan.rows.counts
        ends = plan.rows.starts + counts
        drawn = (ends == sequences.length[plan.members]).astype(np.int64)
        drawn[: plan.num_decode] = counts[: plan.num_decode]
        back = np.repeat(np.cumsum(drawn), drawn) - 1 - np.arange(int(drawn.sum()))
        last_rows = np.cumsum(counts) - 1
        some = drawn > 0
        return Draws(
            plan.members[some],
            drawn[some],
            np.repeat(plan.members, drawn),
            np.repeat(ends, drawn) - back,
            np.repeat(last_rows, drawn) - back,
        )

    def num_valid(self, tokens: NDArray[np.int64], sequences: Sequences) -> NDArray[np.int64]:
        """[S] how many of each session's sampled `tokens` [N] are valid: one, and one per accepted draft."""
        if len(self.owners) == len(self.sessions):
            return self.counts
        wrong = tokens != sequences.tokens[self.owners, self.places]
        wrong[np.cumsum(self.counts) - 1] = True  # what follows the last draft was not computed
        wrong_places = np.flatnonzero(wrong)
        firsts = np.cumsum(self.counts) - self.counts
        return wrong_places[np.searchsorted(wrong_places, firsts)] - firsts + 1


_TRIAL_STEPS = 4
"""Most steps of a run while the acceptance rates of its drafts are not known yet."""


class Stepper:
    """Executes the scheduler's plans with the weights in service."""

    def __init__(
        self, scheduler: Scheduler, weights: DoubleWeights, drafter: NgramLookup | MtpDrafter | None
    ) -> None:
        """`drafter`: the scheduler's."""
        self._scheduler = scheduler
        self._sequences = scheduler.sequences
        self._weights = weights
        self._counters = scheduler.counters
        self._drafter = drafter
        self._gauge = scheduler.gauge

    @torch.no_grad()
    def step(self, plan: StepPlan, most_steps: int) -> list[Answer]:
        """See Engine.step."""
        compute = self._weights.active.compute
        if isinstance(compute, NativeForward) and plan.starts_run:
            most_steps = min(most_steps, compute.steps_ahead(len(plan.members)))
            wanted = self._num_drafts(plan)
            if wanted.any() and not self._gauge.is_calibrated(plan.members):
                most_steps = min(most_steps, _TRIAL_STEPS)
            plan, num_steps = self._scheduler.extend_plan(plan, most_steps, int(wanted.max()))
            if num_steps > 1 or wanted.any():
                return self._decode(plan, num_steps, compute, wanted)
        hidden, routes = compute(plan.rows)
        if routes.shape[1]:
            self._sequences.cache.routes[plan.rows.pages, plan.rows.offsets] = routes.numpy()
        self._count(plan)
        answers = self._sample(plan, hidden)
        if isinstance(self._drafter, MtpDrafter):
            wanted = self._num_drafts(plan)
            self._drafter.draft_after_step(plan, hidden, self._weights.active, wanted)
        return answers

    def _num_drafts(self, plan: StepPlan) -> NDArray[np.int64]:
        """[S] most drafts for each of the plan's members; 0 without a drafter."""
        return self._gauge.choose_num_drafts(plan.members, self._sequences.arrival[plan.members])

    def _count(self, plan: StepPlan) -> None:
        counters, num_decode = self._counters, plan.num_decode
        self._count_steps(1)
        counters.decode_tokens += num_decode
        counters.prefill_tokens += int(plan.rows.counts[num_decode:].sum())
        counters.drafted_tokens += int(plan.rows.counts[:num_decode].sum()) - num_decode

    def _count_steps(self, num_steps: int) -> None:
        self._counters.steps += num_steps
        self._gauge.count_steps(num_steps)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> list[Answer]:
        """Samples from the step's hidden states [T, width] where a token is due; returns the answers."""
        sequences = self._sequences
        ends = plan.rows.starts + plan.rows.counts
        sequences.computed[plan.members] = ends
        draws = Draws.of(plan, sequences)
        answers = self._draw(draws, hidden) if len(draws.sessions) else []
        self._cache_pages(plan, ends)
        return answers

    def _cache_pages(self, plan: StepPlan, ends: NDArray[np.int64]) -> None:
        """Caches the pages that the members [S] have filled, now that they are computed up to `ends`."""
        crossed = ends // PAGE_TOKENS > plan.rows.starts // PAGE_TOKENS
        crossed[plan.num_decode :] = True
        for row in plan.members[crossed].tolist():
            self._scheduler.pages.cache_computed(row)

    def _decode(
        self, plan: StepPlan, num_steps: int, compute: NativeForward, wanted: NDArray[np.int64]
    ) -> list[Answer]:
        """Runs up to `num_steps` steps of the plan's members [S], which all decode, in one call, with up to
        `wanted` [S] drafts in each."""
        sequences, members, most_drafts = self._sequences, plan.members, int(wanted.max())
        drafter = self._drafter if most_drafts else None
        ready, source = self._begin_run(members, drafter)
        run = compute.decode(sequences, members, num_steps, wanted, ready, source)
        ends = run.lengths - 1
        sequences.computed[members] = sequences.length[members] = ends
        self._count_steps(run.num_steps)
        self._counters.decode_tokens += run.num_steps * len(members) + int(run.accepted.sum())
        self._counters.drafted_tokens += int(run.drafted.sum())
        self._counters.accepted_tokens += int(run.accepted.sum())
        if drafter is not None:
            self._gauge.record(members, wanted, run.drafted, run.accepted)
        last = sequences.tokens[members, ends].astype(np.int64)
        answers = self._append_draws(members, last, np.ones_like(members), [])
        if isinstance(drafter, MtpDrafter):
            drafter.record_drafts(members, run.ready)
        self._cache_pages(plan, ends)
        return answers

    def _begin_run(
        self, members: NDArray[np.int64], drafter: NgramLookup | MtpDrafter | None
    ) -> tuple[NDArray[np.int64], NgramLookup | CarriedStates | None]:
        """[S] drafts that already follow the tokens of `members`, and from where native code drafts more."""
        if isinstance(drafter, MtpDrafter):
            return drafter.begin_run(members, self._weights.active.model.final_norm)
        return np.zeros_like(members), drafter

    def _draw(self, draws: Draws, hidden: Tensor) -> list[Answer]:
        """Samples tokens from the step's hidden states [T, width], and appends the valid ones."""
        sequences, compute = self._sequences, self._weights.active.compute
        params = sequences.params(draws.owners)
        if len(draws.hidden_rows) < len(hidden):
            hidden = hidden[torch.from_numpy(draws.hidden_rows)]
        noise = uniforms(sequences.key[draws.owners], draws.places)
        drawn, logprobs = compute.sample(hidden, params, noise)
        alternatives = self._alternatives(hidden, params, drawn)
        tokens = drawn.numpy()
        num_valid = draws.num_valid(tokens, sequences)
        if self._drafter is not None:
            self._gauge.record(draws.sessions, draws.counts - 1, draws.counts - 1, num_valid - 1)
        sequences.tokens[draws.owners, draws.places] = tokens
        sequences.logprobs[draws.owners, draws.places] = logprobs.numpy()
        self._counters.accepted_tokens += int(num_valid.sum()) - len(num_valid)
        self._counters.decode_tokens += int(num_valid.sum()) - len(num_valid)
        return self._append_draws(draws.sessions, tokens, num_valid, alternatives, draws.counts)

    def _append_draws(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        num_valid: NDArray[np.int64],
        alternatives: list[Alternatives | None],
        counts: NDArray[np.int64] | None = None,
    ) -> list[Answer]:
        """Appends to the sessions in `rows` [S] their valid tokens: the first `num_valid` [S] of `counts` [S]
        sampled ones (by default one each), consecutive in `tokens` [N]. Returns the answers that are due."""
        sequences = self._sequences
        counts = np.ones_like(rows) if counts is None else counts
        firsts = np.cumsum(counts) - counts
        special = (num_valid > 1) | sequences.needs_handling(rows, tokens[firsts])
        plain = rows[~special]
        sequences.computed[plain] = sequences.length[plain]
        sequences.length[plain] += 1
        taken = zip(*(x[special].tolist() for x in (rows, firsts, num_valid)), strict=True)
        answers = (
            self._extend(row, tokens[at : at + num].tolist(), alternatives[at : at + num])
            for row, at, num in taken
        )
        return [answer for answer in answers if answer is not None]

    def _alternatives(
        self, hidden: Tensor, params: Sequence[SamplingParams], tokens: Tensor
    ) -> list[Alternatives | None]:
        """Raw and top log-probabilities for each draw [N] whose request asked for them; empty if none did."""
        asked = [n for n, param in enumerate(params) if param.raw_logprobs or param.top_logprobs]
        if not asked:
            return []
        logits = self._weights.active.compute.logits(hidden[asked])
        given = Alternatives.of(logits, [params[n] for n in asked], tokens[asked])
        by_draw = dict(zip(asked, given, strict=True))
        return [by_draw.get(n) for n in range(len(params))]

    def _extend(self, row: int, tokens: list[int], alternatives: list[Alternatives | None]) -> Answer | None:
        """Appends tokens to the session in `row`, up to one that ends the request. Returns the answer that is
        due: the last one, or a chunk of a streaming request; else None."""
        sequences, state = self._sequences, self._sequences.states[row]
        assert state.request is not None
        state.alternatives.extend(given for given in alternatives[: len(tokens)] if given is not None)
        length, reason = int(sequences.length[row]), None
        for taken, token in enumerate(tokens, 1):
            reason = sequences.finish_reason(row, token, length + taken)
            if reason is not None:
                length += taken
                break
        else:
            length += len(tokens)
        sequences.length[row], sequences.computed[row] = length, length - 1
        if reason is not None:
            return self._scheduler.finish(row, reason)
        return sequences.deliver(row) if state.request.streaming else None
