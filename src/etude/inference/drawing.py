"""Which tokens a step draws, and which of them stand.

A decoding row computes its last token and perhaps drafts behind it. At every one of these places the token
is drawn that would be drawn without drafts: from the same distribution, with the noise of (key, position).
The first is right in any case; each following one is right if the draft before it is what was drawn. So
drafts save steps and change no token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.inference.scheduler import StepPlan
from etude.inference.sequences import Sequences


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
