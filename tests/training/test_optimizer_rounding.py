"""bfloat16 states and weights: stochastic rounding is right on average where rounding to nearest stalls."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from etude.config import OptimizerConfig
from etude.training.optimizer import Optimizer
from etude.training.optimizer.rounding import Rounding, round_stochastically
from tests.model.builders import small_model


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32), st.integers(0, 1000))
def test_a_value_becomes_one_of_its_two_neighbours(value: float, seed: int) -> None:
    exact = torch.tensor([value], dtype=torch.float32)
    rounded = round_stochastically(exact, _generator(seed)).float()
    bits = exact.view(torch.int32) & -(1 << 16)
    below, above = bits.view(torch.float32), (bits + (1 << 16)).view(torch.float32)
    assert bool((rounded == below) | (rounded == above))
    if bool(below == exact):
        assert bool(rounded == exact)


def test_rounding_is_right_on_average() -> None:
    value = 1.0 + 0.3 / 128  # three tenths of the way to the next bfloat16
    rounded = round_stochastically(torch.full((200_000,), value), _generator()).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    standard_error = math.sqrt(0.3 * 0.7 / 200_000) / 128
    assert abs(float(rounded.double().mean()) - value) < 5 * standard_error


def test_a_slow_average_moves_where_rounding_to_nearest_stands_still() -> None:
    """beta2 = 0.999: each step's change is under half a unit of bfloat16's last place."""
    target, steps = 2.0, 1500
    exact = target + (1.0 - target) * 0.999**steps
    nearest, kept = torch.ones(512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)
    for step in range(steps):
        nearest.copy_(nearest.float().lerp_(torch.tensor(target), 0.001))
        Rounding(step, lambda _: 0).store("weight", kept, kept.float().lerp_(torch.tensor(target), 0.001))
    assert bool((nearest == 1.0).all()), "the control must stand still, or this tests nothing"
    assert float(kept.float().mean()) == pytest.approx(exact, rel=0.01)


def test_noise_is_a_function_of_step_and_part() -> None:
    values = torch.rand(1000, generator=_generator())

    def store(step: int, part: int) -> Tensor:
        target = torch.zeros(1000, dtype=torch.bfloat16)
        Rounding(step, lambda _: part).store("weight", target, values)
        return target

    assert torch.equal(store(3, 1), store(3, 1))
    assert not torch.equal(store(3, 1), store(4, 1))
    assert not torch.equal(store(3, 1), store(3, 2))


def _trained(dtype: torch.dtype, state_dtype: str, rule: str, steps: int = 300) -> float:
    """Mean squared distance to a teacher after training a small net."""
    generator = _generator(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.to(dtype)
    rates = {"learning_rate": 3e-3, "matrix_learning_rate": 3e-3, "beta2": 0.99, "clip_norm": 10.0}
    rules = {"matrix_optimizer": rule, "state_dtype": state_dtype, "warmup_steps": 0}
    config = OptimizerConfig.model_validate(rates | rules)
    optimizer = Optimizer(model, config, steps)
    inputs = torch.randn((256, 8), generator=generator)
    wanted = torch.stack([inputs[:, :4].sin(), inputs[:, 4:].cos()]).sum(0)
    for _ in range(steps):
        ((model(inputs.to(dtype)).float() - wanted) ** 2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return float(((model(inputs.to(dtype)).float() - wanted) ** 2).mean())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_training_with_bfloat16_states_ends_where_float32_states_do(rule: str) -> None:
    exact = _trained(torch.float32, "float32", rule)
    ours = _trained(torch.float32, "bfloat16", rule)
    start = _trained(torch.float32, "float32", rule, steps=0)
    assert exact < 0.7 * start
    assert ours == pytest.approx(exact, rel=0.1)


def test_bfloat16_weights_train_at_rates_too_small_to_round_to_nearest() -> None:
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = OptimizerConfig(learning_rate=1e-4, warmup_steps=0, decay_share=0.0, state_dtype="bfloat16")
    optimizer = Optimizer(model, config, 100)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert float(model.weight.detach().float().mean()) == pytest.approx(1.0 - 50e-4, abs=5e-4)


def test_bfloat16_states_take_half_the_memory() -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        model = small_model(0)
        config = OptimizerConfig.model_validate({"state_dtype": dtype})
        state = Optimizer(model, config, 10).state_dict()
        sizes[dtype] = sum(t.nbytes for values in state["adamw"].values() for t in values.values() if t.ndim)
    assert sizes["bfloat16"] * 2 == sizes["float32"]
