"""Experts beyond 255 keep their numbers from sampling to the update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etude.agent.recording import Recording
from etude.config import RlConfig
from etude.errors import ConfigError, SamplerError
from etude.inference import Engine
from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams
from etude.training.batches import TrainingSequence
from etude.training.intake import ModelLimits, prepare_groups
from tests.model.builders import VOCAB, random_tokens, small_model
from tests.training.builders import Rollouts, as_group, rl_config

VERSION = PolicyVersion("run", 0)
PROMPT, SAMPLED = 12, 20


def sequences(
    model: LanguageModel, rollouts: Rollouts, recording: Recording, config: RlConfig
) -> list[TrainingSequence]:
    routes = recording.routes()
    assert routes is not None
    member = rollouts.member(
        1.0,
        tokens=recording.tokens,
        sampled=recording.sampled,
        logprobs=recording.logprobs,
        version_spans=recording.version_spans,
        kv_oldest_spans=recording.kv_oldest_spans,
        routes=rollouts.blobs.put(routes),
    )
    limits = ModelLimits.of(model)
    prepared, _ = prepare_groups([as_group([member])], config, limits, VERSION, rollouts.blobs.get)
    return list(prepared[0].chains[0])


def test_experts_beyond_255_are_sampled_recorded_and_replayed() -> None:
    model = small_model(num_experts=300)
    engine = Engine(model.config, VOCAB, 1, 64)
    engine.stage(VERSION, dict(model.named_parameters()))
    engine.activate(VERSION)
    prompt = random_tokens(PROMPT)
    request = SampleRequest("r", "s", prompt, SamplingParams(max_tokens=SAMPLED), frozenset(), (0,))
    engine.submit(request)
    answers = [answer for _ in range(100) if engine.has_work for answer in engine.step()]
    recording = Recording(capacity=8)
    recording.append_given(prompt, "user")
    for chunk in answers[-1].chunks:
        recording.append_sampled(chunk)
    recording.end_message(PROMPT)

    (sequence,) = sequences(model, Rollouts(small_model()), recording, rl_config())
    assert sequence.routes is not None and sequence.routes.dtype == np.uint16
    computed = sequence.routes[:-1]
    assert 255 < computed.max() < 300
    assert (sequence.routes[-1] == 65535).all(), "the last token was never computed"
    own = score_sequences(model, [sequence.tokens])[0]
    replayed = score_sequences(model, [sequence.tokens], routes=[sequence.routes])[0]
    np.testing.assert_allclose(replayed, own, atol=1e-5)
    np.testing.assert_allclose(sequence.logprobs[PROMPT:], own[PROMPT:], atol=1e-4)


def chunk_of(routes: Any, start: int) -> SampleChunk:
    tokens = np.zeros(1, dtype=np.int32)
    return SampleChunk(tokens, tokens.astype(np.float32), VERSION, VERSION, routes, start)


def test_routes_of_another_type_are_refused_and_never_cast() -> None:
    recording = Recording()
    with pytest.raises(SamplerError, match="another type"):
        recording.append_sampled(chunk_of(np.zeros((1, 2, 2), dtype=np.int64), 0))
    recording = Recording()
    recording.append_sampled(chunk_of(np.zeros((1, 2, 2), dtype=np.uint8), 0))
    with pytest.raises(SamplerError, match="another type"):
        recording.append_sampled(chunk_of(np.full((1, 2, 2), 256, dtype=np.uint16), 1))

    rollouts = Rollouts(small_model())
    blob = rollouts.blobs.put(np.zeros((20, 2, 2), dtype=np.int32))
    with pytest.raises(ConfigError, match="uint8 or uint16"):
        prepare_groups(
            [as_group([rollouts.member(1.0, routes=blob)])],
            rl_config(),
            ModelLimits.of(small_model()),
            VERSION,
            rollouts.blobs.get,
        )
