"""The parity gate: trainer and engine score the same sequences, and must agree.

    publish ── stage ── activate ── score (engine) ─┐
                                  ─ score (trainer) ┴─ figures ── metrics ── pass, warn or stop
    rollouts ── step ── parity_k3, parity_max ─────────────────────────────── pass, warn or stop

The gate scores the latest rollouts, and before there are any, prompts of the next tasks. The engine computes
them in one forward pass (prefill). Therefore each step's tokens are also judged as they were decoded: the
first update compares those that its own weights sampled, before anything is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from etude.config import ParityConfig, RunConfig
from etude.errors import ParityError
from etude.observe import Observer
from etude.protocols import Handle, Sampler, Trainer
from etude.records import PolicyVersion, Trajectory
from etude.training.parity import ParityFigures, choose_sequences, compare_logprobs

_LEAST_SAMPLED = 256
"""Fewest decoded tokens whose mean is judged. Fewer say nothing: with rounded weights a single improbable
token may differ by 0.1."""

_CAUSES = (
    "check for incomplete weights (compare digests), different number formats, experts that are chosen "
    "again instead of replayed, or a faulty kernel: `etude doctor parity CHECKPOINT` tests each alone; "
    "to accept a known difference, set parity.limit or parity.on_failure"
)
_CAUSES_EXACT = (
    'numerics="invariant" requires equal bits: check for weights that differ and for operations that bypass '
    'model.ops; or set numerics="fast"'
)


class ParityGate:
    """Compares trainer and engine of one run, over a bounded number of tokens at a time."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Handle[Trainer],
        sampler: Sampler,
        observer: Observer,
        prompts: Sequence[NDArray[np.int32]] = (),
    ) -> None:
        """`prompts`: scored until there are rollouts."""
        self.worst: dict[str, float] = {}
        """Largest figures of all checks, the number of checks and of failed ones. A resumed run restores the
        values of earlier processes."""
        self._config: ParityConfig = config.parity
        self._exact = config.numerics == "invariant"
        self._replays = config.rl.router_replay == "r3"
        # Tokens that attend to keys of older weights differ for that reason.
        keeps_keys = config.rl.max_staleness > 0 and config.rl.kv_on_update == "keep"
        self._judges_sampled = config.parity.num_sequences > 0 and not keeps_keys
        self._sampled_k3 = self._num_sampled = 0.0
        self._trainer = trainer
        self._sampler = sampler
        self._observer = observer
        self._sequences = self._choose(prompts)

    def set_sequences(self, trajectories: Sequence[Trajectory]) -> None:
        """Scores sequences of these rollouts from now on, if they hold any."""
        candidates = [segment.tokens for trajectory in trajectories for segment in trajectory.segments]
        self._sequences = self._choose(candidates) or self._sequences

    async def measure(self, version: PolicyVersion) -> ParityFigures | None:
        """Figures of the current sequences under `version`, which both sides must have; None where the gate
        is off or there are no sequences."""
        if not self._sequences:
            return None
        engine = [await self._sampler.score(tokens, version) for tokens in self._sequences]
        routes = [scores.routes for scores in engine if scores.routes is not None] if self._replays else []
        trainer = await self._trainer.call(Trainer.score, self._sequences, routes or None)
        if any(scores.version != version for scores in trainer):
            raise ParityError(
                "the trainer's weights are of another version than those in service",
                field="version",
                received=f"{trainer[0].version}; serving {version}",
            )
        figures = compare_logprobs([s.logprobs for s in trainer], [s.logprobs for s in engine])
        for name in ("k3", "p99", "max"):
            value = getattr(figures, name)
            if math.isfinite(value):  # the report's JSON has no other numbers; `failed` counts such checks
                self.worst[name] = max(value, self.worst.get(name, 0.0))
        self.worst["checks"] = self.worst.get("checks", 0.0) + 1
        return figures

    def judge(self, figures: ParityFigures, version: PolicyVersion) -> None:
        """Raises ParityError, or only warns, as configured, where the figures do not pass."""
        if not (figures.exact if self._exact else figures.passes(self._config.limit)):
            self._refuse(
                "failed",
                f"trainer and engine are too far apart at {version}: k3 {figures.k3:.3g}, 99 % within "
                f"{figures.p99:.3g}, at most {figures.max:.3g}, over {figures.num_tokens} tokens",
            )

    def judge_sampled(self, metrics: Mapping[str, float], step: int) -> None:
        """As `judge`, for the tokens of this step as they were decoded; `metrics`: the trainer's metrics of
        the step. Only tokens sampled by the weights at the step's beginning count. Where steps have few of
        them, as asynchronous ones may, those of several steps are judged together."""
        if not self._judges_sampled or "parity_k3" not in metrics:
            return
        num_tokens, largest = metrics["parity_tokens"], metrics["parity_max"]
        self._sampled_k3 += metrics["parity_k3"] * num_tokens
        self._num_sampled += num_tokens
        is_finite = math.isfinite(largest)
        if not self._exact and is_finite and self._num_sampled < _LEAST_SAMPLED:
            return
        k3 = self._sampled_k3 / max(1.0, self._num_sampled)
        self._sampled_k3 = self._num_sampled = 0.0
        if not (largest == 0.0 if self._exact else is_finite and k3 <= self._config.limit):
            self._refuse(
                "sampled_failed",
                f"trainer and engine are too far apart in step {step}, over the tokens that the engine "
                f"decoded with the trainer's weights: k3 {k3:.3g}, at most {largest:.3g}",
            )

    def _refuse(self, counted: str, message: str) -> None:
        self.worst[counted] = self.worst.get(counted, 0.0) + 1
        error = ParityError(
            message,
            field="numerics" if self._exact else "parity.limit",
            received="invariant" if self._exact else self._config.limit,
            fix=_CAUSES_EXACT if self._exact else _CAUSES,
        )
        if self._config.on_failure == "stop":
            raise error
        self._observer.say(f"warning: {error}")

    def _choose(self, candidates: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        return choose_sequences(candidates, self._config.num_sequences, self._config.max_tokens)
