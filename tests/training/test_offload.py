"""Optimiser states lie in host memory between two steps, and nothing but their place changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.config import OptimizerConfig
from etude.training.optimizer import Optimizer
from etude.training.optimizer.offload import OffloadedStates
from tests.model.builders import small_model

RULES: list[dict[str, Any]] = [
    {"matrix_optimizer": "adamw"},
    {"matrix_optimizer": "muon"},
    {"matrix_optimizer": "adamw", "state_dtype": "bfloat16"},
    {"matrix_optimizer": "muon", "state_dtype": "bfloat16"},
]


def _made(rule: dict[str, Any]) -> tuple[torch.nn.Module, Optimizer]:
    model = small_model(0)
    return model, Optimizer(model, OptimizerConfig(**rule), 10)


def _step(model: torch.nn.Module, optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def _device_bytes(states: OffloadedStates) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in states._tensors)


@pytest.mark.parametrize("rule", RULES)
def test_offloading_between_steps_changes_no_bit(rule: dict[str, Any]) -> None:
    (model, optimizer), (twin, still) = _made(rule), _made(rule)
    whole = _device_bytes(optimizer._states)
    assert whole > 0
    for seed in range(3):
        optimizer.offload()
        assert _device_bytes(optimizer._states) == 0, "the memory is gone, not only the contents"
        optimizer.offload()
        _step(model, optimizer, seed)
        assert _device_bytes(optimizer._states) == whole
        _step(twin, still, seed)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)), name


@pytest.mark.parametrize("rule", RULES)
def test_states_are_saved_and_loaded_wherever_they_lie(rule: dict[str, Any]) -> None:
    (model, optimizer), (twin, other) = _made(rule), _made(rule)
    _step(model, optimizer, 0)
    optimizer.offload()
    twin.load_state_dict(model.state_dict())
    other.offload()
    other.load_state_dict(optimizer.state_dict())
    assert _device_bytes(optimizer._states) == _device_bytes(other._states) == 0
    _step(model, optimizer, 1)
    _step(twin, other, 1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)), name


def test_offloading_drops_gradients() -> None:
    model, optimizer = _made(RULES[0])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.offload()
    assert all(parameter.grad is None for parameter in model.parameters())


class NoRoom(OffloadedStates):
    """Finds no room for the second tensor, once."""

    fails = True

    def _fetch(self, tensor: torch.Tensor) -> None:
        if self.fails and tensor is self._tensors[1]:
            self.fails = False
            raise torch.OutOfMemoryError("no room")
        super()._fetch(tensor)


def test_a_return_that_finds_no_room_half_way_loses_nothing() -> None:
    tensors = [torch.randn(4), torch.randn(4), torch.randn(4)]
    expected = [tensor.clone() for tensor in tensors]
    states = NoRoom(tensors)
    states.offload()
    with pytest.raises(torch.OutOfMemoryError):
        states.fetch()
    assert all(torch.equal(states.values(t), e) for t, e in zip(tensors, expected, strict=True))
    states.offload()
    assert _device_bytes(states) == 0
    states.fetch()
    assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True))


def test_scalars_stay_where_they_are() -> None:
    scalar, values = torch.zeros(()), torch.ones(3)
    states = OffloadedStates([scalar, values])
    states.offload()
    assert scalar.item() == 0.0 and states.values(scalar) is scalar
    assert _device_bytes(states) == 0
