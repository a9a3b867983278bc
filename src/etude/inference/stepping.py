"""What one step computes of what the scheduler has planned: hidden states, draws, answers.

A decoding row computes its last token and perhaps drafts behind it. At every one of these places the token
is drawn that would be drawn without drafts: from the same distribution, with the noise of (key, position).
The first is right in any case; each following one is right if the draft before it is what was drawn. So
drafts save steps and change no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import PAGE_TOKENS, PagedCache
from etude.inference.draft_gauge import DraftGauge
from etude.inference.mtp import MtpDrafter
from etude.inference.native import NativeForward
from etude.inference.native.drafting import DecodingSteps
from etude.inference.sampling import Alternatives, uniforms
from etude.inference.scheduler import Scheduler, StepPlan
from etude.inference.sequences import Answer, Sequences
from etude.inference.speculation import CarriedStates, NgramLookup
from etude.inference.times import EngineCounters
from etude.inference.weights import DoubleWeights
from etude.records import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """N draws, those of one session consecutive, for S sessions."""

    sessions: NDArray[np.int64]
    """[S] rows of `Sequences`."""
    counts: NDArray[np.int64]
    """[S] draws of each, at least 1."""
    owners: NDArray[np.int64]
    """[N] rows of `Sequences`."""
    places: NDArray[np.int64]
    """[N] position of each token that is drawn."""
    hidden_rows: NDArray[np.int64]
    """[N] rows of the step from which they are drawn."""

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

    def standing(self, tokens: NDArray[np.int64], sequences: Sequences) -> NDArray[np.int64]:
        """[S] how many of each session's draws stand, given the tokens [N] that were drawn."""
        if len(self.owners) == len(self.sessions):
            return self.counts
        wrong = tokens != sequences.tokens[self.owners, self.places]
        wrong[np.cumsum(self.counts) - 1] = True  # whatever lies behind the last draft was not computed
        wrong_places = np.flatnonzero(wrong)
        firsts = np.cumsum(self.counts) - self.counts
        return wrong_places[np.searchsorted(wrong_places, firsts)] - firsts + 1


_TRIAL_STEPS = 4
"""Most steps of a run with drafts of which nobody knows yet whether they pay."""


class Stepper:
    """Carries plans out, with the weights in service."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PagedCache,
        weights: DoubleWeights,
        counters: EngineCounters,
        drafter: NgramLookup | MtpDrafter | None,
        gauge: DraftGauge,
    ) -> None:
        """`drafter`, `gauge`: those of the scheduler."""
        self._scheduler = scheduler
        self._sequences = scheduler.sequences
        self._cache = cache
        self._weights = weights
        self._counters = counters
        self._drafter = drafter
        self._gauge = gauge

    @torch.no_grad()
    def step(self, plan: StepPlan, most_steps: int) -> list[Answer]:
        """See Engine.step."""
        compute = self._weights.active.compute
        if isinstance(compute, NativeForward) and self._scheduler.only_decodes(plan):
            most_steps = min(most_steps, compute.steps_ahead(len(plan.members)))
            wanted = self._wanted(plan)
            if wanted.any() and not self._gauge.is_settled(plan.members):
                most_steps = min(most_steps, _TRIAL_STEPS)
            plan, num_steps = self._scheduler.ahead(plan, most_steps, int(wanted.max()))
            if num_steps > 1 or wanted.any():
                return self._decode(plan, num_steps, compute, wanted)
        hidden, routes = self._weights.active.compute(plan.rows)
        if routes.shape[1]:
            self._cache.routes[plan.rows.pages, plan.rows.offsets] = routes.numpy()
        self._count(plan)
        answers = self._sample(plan, hidden)
        if isinstance(self._drafter, MtpDrafter):
            wanted = self._wanted(plan)
            self._drafter.follow(plan, hidden, self._weights.active, self._sequences, wanted)
        return answers

    def _wanted(self, plan: StepPlan) -> NDArray[np.int64]:
        """[S] most drafts for each of the plan's members."""
        if self._drafter is None:
            return np.zeros_like(plan.members)
        return self._gauge.wanted(plan.members, self._sequences.arrival[plan.members])

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
        """Draws what can be drawn from the step's hidden states [T, width]; returns the answers."""
        sequences = self._sequences
        ends = plan.rows.starts + plan.rows.counts
        sequences.computed[plan.members] = ends
        draws = Draws.of(plan, sequences)
        answers = self._draw(draws, hidden) if len(draws.sessions) else []
        self._cache_pages(plan, ends)
        return answers

    def _cache_pages(self, plan: StepPlan, ends: NDArray[np.int64]) -> None:
        """Shares the pages that the members [S] have filled, now that they are computed up to `ends`."""
        crossed = ends // PAGE_TOKENS > plan.rows.starts // PAGE_TOKENS
        crossed[plan.num_decode :] = True
        for row in plan.members[crossed].tolist():
            self._scheduler.pages.cache_computed(row)

    def _decode(
        self, plan: StepPlan, num_steps: int, compute: NativeForward, wanted: NDArray[np.int64]
    ) -> list[Answer]:
        """Up to `num_steps` steps of the plan's members [S], which all decode, in one call, with up to
        `wanted` [S] drafts in each."""
        sequences, members, most_drafts = self._sequences, plan.members, int(wanted.max())
        drafter = self._drafter if most_drafts else None
        lengths = sequences.length[members]
        left = sequences.limit[members] - lengths
        places = min(num_steps * (1 + most_drafts), int(left.max())) + most_drafts
        noise = uniforms(sequences.key[members][:, None], lengths[:, None] + np.arange(places))
        ready, source = self._begin_run(members, drafter)
        run = DecodingSteps(
            rows=members,
            most_steps=num_steps,
            most_positions=num_steps * len(members),
            lengths=lengths.copy(),
            wanted=wanted,
            ready=ready,
            stops=sequences.stops(members),
            noise=noise,
            source=source,
        )
        taken = compute.decode(run, sequences, self._params(members))
        ends = run.lengths - 1
        sequences.computed[members] = sequences.length[members] = ends
        self._count_steps(taken)
        self._counters.decode_tokens += taken * len(members) + int(run.stood.sum())
        self._counters.drafted_tokens += int(run.drafted.sum())
        self._counters.accepted_tokens += int(run.stood.sum())
        if drafter is not None:
            self._gauge.note(members, wanted, run.drafted, run.stood)
        last = sequences.tokens[members, ends].astype(np.int64)
        answers = self._settle(members, last, np.ones_like(members), [])
        if isinstance(drafter, MtpDrafter):
            drafter.note(members, run.ready, sequences)
        self._cache_pages(plan, ends)
        return answers

    def _begin_run(
        self, members: NDArray[np.int64], drafter: NgramLookup | MtpDrafter | None
    ) -> tuple[NDArray[np.int64], NgramLookup | CarriedStates | None]:
        """How many drafts lie behind the tokens of `members` [S], and where native code gets more of them."""
        if isinstance(drafter, MtpDrafter):
            return drafter.begin_run(members, self._sequences, self._weights.active.model.final_norm)
        return np.zeros_like(members), drafter

    def _params(self, rows: NDArray[np.int64]) -> list[SamplingParams]:
        """Of the requests in `rows`, which all have one."""
        requests = [self._sequences.states[row].request for row in rows.tolist()]
        params = [request.params for request in requests if request is not None]
        assert len(params) == len(requests), "only rows with a request sample"
        return params

    def _draw(self, draws: Draws, hidden: Tensor) -> list[Answer]:
        """Draws tokens from the step's hidden states [T, width], and keeps those that stand."""
        sequences, compute = self._sequences, self._weights.active.compute
        params = self._params(draws.owners)
        if len(draws.hidden_rows) < len(hidden):
            hidden = hidden[torch.from_numpy(draws.hidden_rows)]
        noise = uniforms(sequences.key[draws.owners], draws.places)
        drawn, logprobs = compute.sample(hidden, params, noise)
        alternatives = self._alternatives(hidden, params, drawn)
        tokens = drawn.numpy()
        standing = draws.standing(tokens, sequences)
        if self._drafter is not None:
            self._gauge.note(draws.sessions, draws.counts - 1, draws.counts - 1, standing - 1)
        sequences.keep(draws.owners, draws.places, tokens, logprobs.numpy())
        self._counters.accepted_tokens += int(standing.sum()) - len(standing)
        self._counters.decode_tokens += int(standing.sum()) - len(standing)
        return self._settle(draws.sessions, tokens, standing, alternatives, draws.counts)

    def _settle(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        standing: NDArray[np.int64],
        alternatives: list[Alternatives | None],
        counts: NDArray[np.int64] | None = None,
    ) -> list[Answer]:
        """Lengthens the sessions in `rows` [S] by those of their drawn tokens that stand: `standing` [S] of
        `counts` [S], by default one each, consecutive in `tokens` [N]."""
        sequences = self._sequences
        counts = np.ones_like(rows) if counts is None else counts
        firsts = np.cumsum(counts) - counts
        special = (standing > 1) | sequences.needs_care(rows, tokens[firsts])
        plain = rows[~special]
        sequences.computed[plain] = sequences.length[plain]
        sequences.length[plain] += 1
        taken = zip(*(x[special].tolist() for x in (rows, firsts, standing)), strict=True)
        answers = (
            self._take_up(row, tokens[at : at + num].tolist(), alternatives[at : at + num])
            for row, at, num in taken
        )
        return [answer for answer in answers if answer is not None]

    def _alternatives(
        self, hidden: Tensor, params: Sequence[SamplingParams], tokens: Tensor
    ) -> list[Alternatives | None]:
        """Of each draw [N] whose request asked for them. An empty list if none did."""
        asked = [n for n, param in enumerate(params) if param.raw_logprobs or param.top_logprobs]
        if not asked:
            return []
        logits = self._weights.active.compute.logits(hidden[asked])
        given = Alternatives.of(logits, [params[n] for n in asked], tokens[asked])
        by_draw = dict(zip(asked, given, strict=True))
        return [by_draw.get(n) for n in range(len(params))]

    def _take_up(self, row: int, tokens: list[int], alternatives: list[Alternatives | None]) -> Answer | None:
        """Lengthens the session in `row` by its next tokens, up to one that ends the request; the answer, if
        there is one to give now."""
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
