"""Longer context windows: changes for long sequences, none for short ones."""

from __future__ import annotations

import pytest
import torch

from etude.config import StageConfig
from etude.errors import ConfigError
from etude.model.scoring import score_sequences
from etude.training.pretraining.context import extended, set_context
from tests.model.builders import random_tokens, small_config, small_model


def test_a_stage_stretches_from_the_first_window() -> None:
    first = extended(small_config(), StageConfig(from_step=0, window=256))
    second = extended(first, StageConfig(from_step=9, window=1024))
    assert (first.rope_factor, first.rope_original_positions) == (2.0, 128)
    assert (second.rope_factor, second.rope_original_positions, second.max_positions) == (8.0, 128, 1024)


def test_yarn_is_not_put_on_top_of_another_stretching() -> None:
    stretched = small_config(rope_scaling="llama3", rope_factor=4.0, rope_original_positions=32)
    with pytest.raises(ConfigError, match="already scaled") as caught:
        extended(stretched, StageConfig(from_step=0, window=256))
    assert caught.value.field == "stages.rope"
    assert extended(stretched, StageConfig(from_step=0, window=256, rope="keep")).rope_factor == 4.0


def test_a_raised_base_turns_the_slowest_dimension_as_far_in_the_new_window() -> None:
    old = small_config()
    new = extended(old, StageConfig(from_step=0, window=512, rope="base"))
    slowest = [config.rope_theta ** -((16 - 2) / 16) * config.max_positions for config in (old, new)]
    assert slowest[1] == pytest.approx(slowest[0])
    given = extended(old, StageConfig(from_step=0, window=512, rope="base", rope_theta=5e5))
    assert given.rope_theta == 5e5
    kept = extended(old, StageConfig(from_step=0, window=512, rope="keep"))
    assert (kept.rope_theta, kept.rope_factor, kept.max_positions) == (old.rope_theta, 1.0, 512)


def test_a_model_gets_the_tables_of_its_new_window_in_place() -> None:
    model = small_model(0)
    tokens = random_tokens(60)
    before = score_sequences(model, [tokens])[0]
    set_context(model, extended(model.config, StageConfig(from_step=0, window=256, rope="keep")))
    assert (score_sequences(model, [tokens])[0] == before).all(), "the same frequencies, only more positions"
    assert score_sequences(model, [random_tokens(250)])[0].shape == (250,)
    set_context(model, extended(model.config, StageConfig(from_step=0, window=512)))
    assert model.config.rope_factor == 2.0
    fresh = type(model)(model.config, model.vocab_size)
    assert torch.equal(fresh.cosine, model.cosine)


def test_a_shorter_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="shorter"):
        extended(small_config(), StageConfig(from_step=0, window=64))
