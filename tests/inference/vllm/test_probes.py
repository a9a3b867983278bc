"""A probe distinguishes weights, within the noise of their number format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import WeightUpdateError
from etude.inference.vllm.probes import Probe, check_probe
from etude.model.huggingface import save_model
from etude.model.loading import load_any_model
from tests.inference.vllm.builders import tiny_model
from tests.model import transformers_builders


def test_equal_weights_agree_and_others_do_not() -> None:
    one, other = Probe.of(tiny_model(0)), Probe.of(tiny_model(1))
    check_probe(one.logprobs, one, other, "float32")
    with pytest.raises(WeightUpdateError, match="do not match these weights"):
        check_probe(other.logprobs, one, None, "float32")


def test_an_update_smaller_than_the_noise_is_told_from_none() -> None:
    model = tiny_model(0)
    before = Probe.of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 4e-4)
    after = Probe.of(model)
    assert np.abs(after.logprobs - before.logprobs).mean() < 5e-2
    noise = np.random.default_rng(0).normal(0, 2e-3, len(after.tokens)).astype(np.float32)
    check_probe(after.logprobs + noise, after, before, "bfloat16")
    with pytest.raises(WeightUpdateError, match="closer to the previous version"):
        check_probe(before.logprobs + noise, after, before, "bfloat16")


def test_numbers_that_are_none_are_refused() -> None:
    probe = Probe.of(tiny_model(0))
    with pytest.raises(WeightUpdateError, match="not numbers"):
        check_probe(np.full_like(probe.logprobs, np.nan), probe, None, "float32")
    with pytest.raises(WeightUpdateError, match="not numbers"):
        check_probe(probe.logprobs[1:], probe, None, "float32")


def test_any_architecture_is_loaded(tmp_path: Path) -> None:
    ours, theirs = tiny_model(3, "qwen3"), transformers_builders.tiny_model("glm4_moe")
    save_model(ours, tmp_path / "ours")
    theirs.save(tmp_path / "theirs")
    for model, name in ((ours, "ours"), (theirs, "theirs")):
        loaded = Probe.of(load_any_model(tmp_path / name))
        np.testing.assert_allclose(loaded.logprobs, Probe.of(model).logprobs, atol=1e-5)
