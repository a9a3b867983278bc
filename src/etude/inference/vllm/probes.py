"""Probes verify the weights in use: log-probabilities of a fixed sequence, compared with those of a freshly
loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from etude.errors import WeightUpdateError
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.model.scoring import score_sequences
from etude.model.transformers_model import TransformersModel

PROBE_TOKENS = 128
_MEAN_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
_LARGEST_FACTOR = 20.0
"""Tolerance of a single token, as a multiple of that of the mean."""
_SEED = 20


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A fixed sequence, and a model's log-probabilities of it."""

    tokens: NDArray[np.int32]
    """[P]"""
    logprobs: NDArray[np.float32]
    """[P]; [0] is 0."""

    @staticmethod
    def of(model: AnyModel) -> Probe:
        """The probe of a model, scored by the trainer when it publishes."""
        limit = model.max_positions if isinstance(model, TransformersModel) else model.config.max_positions
        tokens = probe_tokens(model.vocab_size, min(PROBE_TOKENS, limit - 1))
        return Probe(tokens, score_sequences(cast(LanguageModel, model), [tokens])[0])

    @staticmethod
    def from_lists(tokens: Sequence[int], logprobs: Sequence[float]) -> Probe:
        """Parses JSON values. Raises ValueError."""
        if len(tokens) != len(logprobs) or len(tokens) < 2:
            raise ValueError("a probe has as many log-probabilities as tokens, and two at least")
        return Probe(np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32))

    def to_lists(self) -> dict[str, Any]:
        """The probe as JSON values."""
        return {"tokens": self.tokens.tolist(), "logprobs": self.logprobs.tolist()}


def probe_tokens(vocab_size: int, length: int) -> NDArray[np.int32]:
    """The probe sequence for a vocabulary size: uniformly random, so that most experts get some tokens."""
    return np.random.default_rng(_SEED).integers(0, vocab_size, length).astype(np.int32)


def check_probe(
    observed: NDArray[np.float32],
    expected: Probe,
    previous: Probe | None,
    dtype: str,
    tolerance: float = 0.0,
) -> None:
    """Compares log-probabilities of `expected.tokens`. `tolerance`: of the mean; 0: by number format.

    Small updates move log-probabilities by less than bfloat16's noise, so what is observed must also be
    nearer to the new weights than to the old. Raises WeightUpdateError.
    """
    bound = tolerance or _MEAN_TOLERANCE.get(dtype, _MEAN_TOLERANCE["bfloat16"])
    if observed.shape != expected.logprobs.shape or not bool(np.isfinite(observed).all()):
        raise WeightUpdateError(
            "the probe's log-probabilities are not numbers", field="probe", received=observed.shape
        )
    distance = np.abs(observed[1:] - expected.logprobs[1:])
    mean, largest = float(distance.mean()), float(distance.max())
    is_stale = False
    if previous is not None and np.array_equal(previous.tokens, expected.tokens):
        before = float(np.abs(observed[1:] - previous.logprobs[1:]).mean())
        moved = float(np.abs(expected.logprobs[1:] - previous.logprobs[1:]).mean())
        is_stale = before < mean and moved > bound / 10
    if mean > bound or largest > bound * _LARGEST_FACTOR or is_stale:
        raise WeightUpdateError(
            "vLLM's log-probabilities do not match these weights",
            field="probe",
            received=f"mean {mean:.2g}, largest {largest:.2g} from a freshly loaded model"
            + ("; closer to the previous version" if is_stale else ""),
            fix=f"the limits are {bound:g} and {bound * _LARGEST_FACTOR:g}",
        )
