"""Other architectures: packed as alone, gradients too; experts recorded and replayed by their routers."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from etude.errors import CheckpointError, ConfigError
from etude.model import LanguageModel, ReplayedRoutes, RouterStatistics
from etude.model import transformers_model as module
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.model.transformers_model import TransformersModel
from tests.model.transformers_builders import KINDS, ROUTED, tiny_model

LENGTHS = (30, 7, 21, 28, 12)


def batch_of(model: TransformersModel) -> tuple[PackedSequences, Tensor]:
    random = np.random.default_rng(0)
    batch = PackedSequences.pack([random.integers(1, 256, n).astype(np.int32) for n in LENGTHS])
    first = set(batch.starts)
    return batch, torch.tensor([i for i in range(len(batch.tokens)) if i not in first])


def logprobs(model: TransformersModel, **options: Any) -> Tensor:
    batch, targets = batch_of(model)
    return packed_logprobs(cast(LanguageModel, model), batch, targets, **options)[0]


def alone(model: TransformersModel) -> Tensor:
    """Log-probabilities of each sequence by transformers itself, without padding."""
    batch, _ = batch_of(model)
    parts: list[Tensor] = []
    for ids in batch.tokens.split(list(batch.attention.lengths)):
        scores = cast(Any, model.inner)(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        parts.append(scores[:-1].gather(-1, ids[1:, None])[:, 0])
    return torch.cat(parts)


def gradients(model: TransformersModel, values: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_packed_log_probabilities_and_gradients_are_those_of_each_alone(kind: str) -> None:
    model = tiny_model(kind)
    packed, single = logprobs(model), alone(model)
    torch.testing.assert_close(packed, single, atol=5e-5, rtol=1e-4)
    ours, theirs = gradients(model, packed), gradients(model, single)
    assert ours.keys() == theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-5 * scale, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUTED)
def test_recorded_experts_are_replayed_exactly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GROUP_TOKENS", 60)
    model = tiny_model(kind)
    num_layers, top_k = model.routes_shape
    batch, targets = batch_of(model)
    recorder = model.recorder()
    free = logprobs(model, routes=recorder)
    torch.testing.assert_close(free, logprobs(model), atol=0, rtol=0)
    routes = recorder.pop_routes(len(batch.tokens), targets - 1)
    assert routes.shape == (len(batch.tokens), num_layers, top_k)
    replay = ReplayedRoutes(routes, targets - 1)
    replayed = logprobs(model, routes=replay)
    replay.check_consumed()
    torch.testing.assert_close(replayed, free, atol=1e-6, rtol=1e-6)
    other = (routes.long() + 1) % 4
    changed = logprobs(model, routes=ReplayedRoutes(other.to(torch.uint8), targets - 1))
    assert float((changed - free).detach().abs().max()) > 1e-3
    gradients(model, changed)
    for router in model.routers:
        (weight,) = (weight for weight in router.parameters() if weight.ndim == 2)
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0


@pytest.mark.parametrize("kind", ROUTED)
def test_the_load_is_balanced_over_tokens_and_not_padding(kind: str) -> None:
    model = tiny_model(kind)
    statistics = RouterStatistics([], [])
    logprobs(model, statistics=statistics)
    assert len(statistics.shares) == model.routes_shape[0]
    for share, probability in zip(statistics.shares, statistics.probabilities, strict=True):
        assert float(share.sum()) == pytest.approx(1.0)
        assert float(probability.sum().detach()) == pytest.approx(1.0)
    statistics.balance_loss().backward()


def test_a_dense_model_is_asked_for_no_experts() -> None:
    model = tiny_model("llama")
    assert model.routes_shape == (0, 0) and not model.has_unknown_routers
    statistics, recorder = RouterStatistics([], []), model.recorder()
    torch.testing.assert_close(
        logprobs(model, routes=recorder, statistics=statistics), logprobs(model), atol=0, rtol=0
    )
    assert float(statistics.balance_loss()) == 0.0
    assert recorder.pop_routes(sum(LENGTHS)).shape == (sum(LENGTHS), 0, 0)


def test_routers_that_are_not_known_are_refused_and_never_ignored() -> None:
    model = tiny_model("gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2)
    assert model.has_unknown_routers and model.num_experts == 0
    assert bool(logprobs(model).isfinite().all())
    for asked in ({"routes": ReplayedRoutes(torch.zeros((sum(LENGTHS), 0, 0), dtype=torch.uint8))}, {}):
        with pytest.raises(ConfigError, match="cannot be replayed"):
            logprobs(model, statistics=RouterStatistics([], []), **asked)


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "t5", "qwen3_next"])
def test_models_with_a_state_or_an_encoder_are_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match=r"recurrent layers|is an encoder"):
        TransformersModel.from_config(transformers.AutoConfig.for_model(kind), 0)
