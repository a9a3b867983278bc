"""Muon against its definition, the schedule, the clip, and steps that must not happen."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from etude.config import OptimizerConfig
from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.training.optimizer import OffendingBatches, Optimizer
from etude.training.optimizer.muon import Muon, orthogonalise
from etude.training.optimizer.optimizer import schedule_factor
from etude.training.optimizer.rounding import Rounding
from etude.training.parallel.layout import Layout
from tests.model.builders import small_model


def _matrices(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8), (1, 1, 5)])
def test_orthogonalising_brings_singular_values_near_one_and_keeps_their_vectors(
    shape: tuple[int, ...],
) -> None:
    matrices = _matrices(*shape) * 7.0
    result = orthogonalise(matrices)
    u, values, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert values.max() > 2.0
    inner = u.transpose(-1, -2) @ result @ vh.transpose(-1, -2)
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    well_conditioned = values > 0.05 * values.amax(-1, keepdim=True)
    assert diagonal[well_conditioned].min() > 0.6
    assert diagonal.max() < 1.25
    torch.testing.assert_close(inner, torch.diag_embed(diagonal), atol=1e-4, rtol=0)


def test_orthogonalising_nothing_gives_nothing() -> None:
    assert not orthogonalise(torch.zeros(2, 4, 6)).any()


def test_muon_is_nesterov_momentum_orthogonalised_matrix_by_matrix() -> None:
    """As Jordan et al. write it down, for two and three dimensions, over three steps."""
    shapes = [(6, 4), (4, 6), (3, 6, 4), (6, 4)]
    parameters = [nn.Parameter(_matrices(*shape)) for shape in shapes]
    plain = [parameter.detach().clone() for parameter in parameters]
    buffers = [torch.zeros_like(matrix) for matrix in plain]
    layout = Layout(nn.ParameterList(parameters))
    muon = Muon(layout, list(layout.parts))
    for step in range(3):
        gradients = [_matrices(*shape) * (step + 1) + index for index, shape in enumerate(shapes)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        muon.step(layout.gradients(), 0.1, Rounding(step, layout.part_index))
        for matrix, buffer, gradient in zip(plain, buffers, gradients, strict=True):
            buffer.mul_(0.95).add_(gradient, alpha=0.05)
            update = 0.05 * gradient + 0.95 * buffer
            scale = max(1.0, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
            for part, direction in zip(
                matrix.view(-1, *matrix.shape[-2:]), update.view(-1, *update.shape[-2:]), strict=True
            ):
                part.sub_(0.1 * scale * orthogonalise(direction[None])[0])
    for parameter, matrix in zip(parameters, plain, strict=True):
        torch.testing.assert_close(parameter.detach(), matrix, atol=1e-5, rtol=1e-4)


def _optimizer(model: nn.Module | None = None, num_steps: int = 10, **changes: object) -> Optimizer:
    values = {"learning_rate": 0.1, "warmup_steps": 0, "decay_share": 0.0, "clip_norm": 1e9}
    config = OptimizerConfig.model_validate(values | changes)
    return Optimizer(model or nn.Linear(2, 2), config, num_steps)


def _factors(optimizer: Optimizer, count: int) -> list[float]:
    factors = []
    for _ in range(count):
        factors.append(optimizer.schedule())
        optimizer.step()
    return factors


def test_the_schedule_warms_up_stays_and_decays_to_its_final_share() -> None:
    optimizer = _optimizer(num_steps=10, warmup_steps=3, decay_share=0.4, final_share=0.3)
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.3, 0.3, 0.3]
    assert _factors(optimizer, 12) == pytest.approx(expected)


def test_without_warm_up_and_decay_the_rate_is_constant() -> None:
    assert _factors(_optimizer(num_steps=3), 6) == [1.0] * 6


def test_a_line_and_half_a_cosine_end_at_the_final_share() -> None:
    shape = {"num_steps": 10, "warmup_steps": 2, "final_share": 0.2}
    line = _factors(_optimizer(schedule="linear", **shape), 12)
    assert line == pytest.approx([1 / 3, 2 / 3, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])
    cosine = _factors(_optimizer(schedule="cosine", **shape), 12)
    expected = [0.2 + 0.4 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert cosine == pytest.approx([1 / 3, 2 / 3, *expected, 0.2])
    assert _factors(_optimizer(schedule="constant", **shape), 12) == pytest.approx([1 / 3, 2 / 3, *[1] * 10])


@given(
    schedule=st.sampled_from(["wsd", "linear", "cosine", "constant"]),
    num_steps=st.integers(1, 50),
    warmup_steps=st.integers(0, 60),
    decay_share=st.floats(0, 1),
    final_share=st.floats(0, 1),
)
def test_every_schedule_stays_between_nothing_and_the_peak(num_steps: int, **changes: Any) -> None:
    config = OptimizerConfig(**changes)
    factors = [schedule_factor(config, step, num_steps) for step in range(num_steps + 5)]
    assert all(0 <= factor <= 1 for factor in factors)
    after = factors[changes["warmup_steps"] :]
    assert after == sorted(after, reverse=True), "after the warm-up a rate never rises"


@pytest.mark.parametrize("matrix_optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(matrix_optimizer: str, value: float) -> None:
    model, twin = small_model(0), small_model(0)
    optimizer = _optimizer(model, matrix_optimizer=matrix_optimizer, matrix_learning_rate=0.1)
    fresh = _optimizer(twin, matrix_optimizer=matrix_optimizer, matrix_learning_rate=0.1)
    _set_gradients(model)
    assert model.final_norm.grad is not None
    model.final_norm.grad[0] = value
    optimizer.step()
    assert (optimizer.num_skipped, optimizer.num_taken) == (1, 1)
    _assert_same(model, twin)
    assert all(parameter.grad is None for parameter in model.parameters())
    for chosen, other in ((optimizer, model), (fresh, twin)):
        _set_gradients(other)
        chosen.step()
    _assert_same(model, twin)


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_returned() -> None:
    """AdamW's first mean is (1 - beta1) times the gradient that it was given."""
    for clip, expected in ((1.0, 0.5), (10.0, 2.0)):
        model = nn.Linear(2, 2, bias=False)
        optimizer = _optimizer(model, clip_norm=clip)
        model.weight.grad = torch.full((2, 2), 2.0)
        assert optimizer.step() == pytest.approx(4.0)
        mean = optimizer.state_dict()["adamw"]["weight"]["exp_avg"] / 0.1
        torch.testing.assert_close(mean, torch.full((2, 2), expected), rtol=1e-4, atol=0)


def test_the_offending_batch_is_kept_and_only_the_newest_few(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    config = OptimizerConfig(clip_norm=1.0)
    offending = OffendingBatches(tmp_path / "offending", keep=2)
    optimizer = Optimizer(model, config, 10, offending=offending)
    for step, value in enumerate([1.0, float("nan"), float("inf"), 1.0, float("nan")]):
        model.weight.grad = torch.full((2, 2), value)
        optimizer.step(lambda step=step: {"tokens": torch.tensor([step])})
    assert optimizer.num_skipped == 3
    kept = [torch.load(path, weights_only=True) for path in offending.kept()]
    assert [(batch["step"], batch["tokens"].item()) for batch in kept] == [(2, 2), (4, 4)]
    assert math.isinf(kept[0]["grad_norm"])
    assert math.isnan(kept[1]["grad_norm"])
    assert {path.suffix for path in (tmp_path / "offending").iterdir()} == {".pt"}


def test_a_disk_without_room_costs_the_batch_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "offending").touch()  # no directory can be made there
    model = nn.Linear(2, 2)
    offending = OffendingBatches(tmp_path / "offending")
    optimizer = Optimizer(model, OptimizerConfig(), 10, offending=offending)
    model.weight.grad = torch.full((2, 2), float("nan"))
    with pytest.warns(UserWarning, match="cannot be stored"):
        optimizer.step(lambda: {"tokens": torch.tensor([1])})
    assert (optimizer.num_taken, optimizer.num_skipped, model.weight.grad) == (1, 1, None)


def test_a_good_batch_is_never_described() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    Optimizer(model, OptimizerConfig(), 10).step(lambda: pytest.fail("described"))


def test_frozen_parameters_have_no_state_and_stay() -> None:
    model = small_model(0)
    model.embedding.requires_grad_(False)
    optimizer = _optimizer(model, matrix_optimizer="muon", weight_decay=0.5)
    _set_gradients(model)
    optimizer.step()
    assert "embedding" not in optimizer.state_dict()["adamw"]
    assert torch.equal(model.embedding, small_model(0).embedding)


def test_weight_decay_spares_vectors_and_muons_matrices() -> None:
    for matrix_optimizer, decayed in (("adamw", True), ("muon", False)):
        model, before = small_model(0), small_model(0)
        optimizer = _optimizer(model, matrix_optimizer=matrix_optimizer, weight_decay=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for (name, parameter), old in zip(model.named_parameters(), before.parameters(), strict=True):
            shrinks = old.ndim >= 2 and (decayed or name == "embedding")
            torch.testing.assert_close(parameter, old * 0.95 if shrinks else old, msg=name)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("matrix_optimizer", ["adamw", "muon"])
def test_a_restored_state_goes_on_bit_for_bit(matrix_optimizer: str, state_dtype: str) -> None:
    model, twin = small_model(0), small_model(0)
    options = {"matrix_optimizer": matrix_optimizer, "state_dtype": state_dtype, "warmup_steps": 4}
    first = _optimizer(model, **options)
    for seed in range(3):
        _set_gradients(model, seed)
        first.step()
    second = _optimizer(twin, **options)
    twin.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer, other in ((first, model), (second, twin)):
        for seed in range(3, 6):
            _set_gradients(other, seed)
            optimizer.step()
    _assert_same(model, twin)
    assert second.num_taken == 6


def test_a_state_of_another_rule_or_model_is_refused_and_changes_nothing() -> None:
    optimizer = _optimizer(small_model(0), matrix_optimizer="muon")
    before = str(optimizer.state_dict())
    for other in (
        _optimizer(small_model(0), matrix_optimizer="adamw"),
        _optimizer(small_model(0, num_layers=1), matrix_optimizer="muon"),
        _optimizer(small_model(0, expert_size=32), matrix_optimizer="muon"),
        _optimizer(small_model(0), matrix_optimizer="muon", state_dtype="bfloat16"),
    ):
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict(other.state_dict())
        assert caught.value.field == "optimizer"
        assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("state", [{}, {"adamw": {"state": {}, "param_groups": [{}]}, "muon": []}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        _optimizer(small_model(0)).load_state_dict(state)


def _set_gradients(model: LanguageModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def _assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
