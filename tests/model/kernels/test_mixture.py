"""A layer's experts in one native call: what they compute, whatever the threads and shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.errors import RouteReplayError
from etude.model.experts import mix_by_expert
from etude.model.kernels.native import find_compiler, mixture

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _same_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs(tokens: int, experts: int, top_k: int, width: int, inner: int, seed: int = 0) -> list[Tensor]:
    """x, gate_up, down, chosen and weights; of the experts only the first half is chosen."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, width), (experts, width, 2 * inner), (experts, inner, width), (tokens, top_k)]
    x, gate_up, down, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    used = max(top_k, experts // 2)
    chosen = torch.rand((tokens, used), generator=generator).topk(top_k).indices
    return [x, gate_up / width**0.5, down / inner**0.5, chosen, weights]


def computed(given: list[Tensor], as_engine: bool) -> list[Tensor]:
    """The sum, and the gradients of x, weights, gate_up and down."""
    x, gate_up, down, chosen, weights = given
    out, made = mixture.mix(x, gate_up, down, chosen, weights, as_engine=as_engine)
    to_gate_up, to_down = torch.full_like(gate_up, 9.0), torch.full_like(down, 9.0)
    back = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view_as(out)
    to_x, to_weights = mixture.mix_backward(back, made, gate_up, down, to_gate_up, to_down)
    return [out, to_x, to_weights, to_gate_up, to_down]


def exact(given: list[Tensor]) -> list[Tensor]:
    """The same in float64, expert by expert."""
    x, gate_up, down, weights = (given[i].double().requires_grad_() for i in (0, 1, 2, 4))
    out = mix_by_expert(x, gate_up, down, given[3], weights)
    back = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, [x, weights, gate_up, down], back.double())]


@pytest.mark.parametrize("as_engine", [False, True])
@given(
    tokens=st.integers(1, 700),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 3),
    width=st.sampled_from([4, 20, 64, 130]),
    inner=st.sampled_from([3, 16, 75]),
    seed=st.integers(0, 99),
)
def test_sums_and_gradients_are_those_of_float64(
    tokens: int, experts: int, top_k: int, width: int, inner: int, seed: int, as_engine: bool
) -> None:
    given = inputs(tokens, experts, min(top_k, experts), width, inner, seed)
    for ours, wanted in zip(computed(given, as_engine), exact(given), strict=True):
        torch.testing.assert_close(ours.double(), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("as_engine", [False, True])
@pytest.mark.parametrize("experts", [2, 9])
def test_bits_do_not_depend_on_threads(experts: int, as_engine: bool) -> None:
    given, results = inputs(2100, experts, 2, 72, 40), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(computed(given, as_engine))
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


def test_experts_that_nobody_chose_get_gradients_of_zero() -> None:
    *_, to_gate_up, to_down = computed(inputs(50, 8, 2, 20, 16), as_engine=False)
    assert not to_gate_up[4:].any() and not to_down[4:].any()
    assert to_gate_up[:4].any() and to_down[:4].any()


@pytest.mark.parametrize("wrong", [-1, 8, 255])
def test_a_route_to_no_expert_is_refused(wrong: int) -> None:
    x, gate_up, down, chosen, weights = inputs(50, 8, 2, 20, 16)
    chosen[3, 1] = wrong
    with pytest.raises(RouteReplayError, match=f"0 to 7.*{wrong}"):
        mixture.mix(x, gate_up, down, chosen, weights, as_engine=False)
