"""Log-probabilities by blocks of rows: the plain computation's values and gradients, in a bounded space."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etude.model import logprobs
from etude.model.kernels.native import calls, find_compiler
from etude.model.logprobs import checkpointed_logprobs, head_logprobs

VOCAB, WIDTH, ROWS = 37, 8, 300
ORDERS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(find_compiler() is None, reason="no C compiler")),
]
"""Whether the sums are in the engine's order."""


def _case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((ROWS, WIDTH), generator=generator).to(dtype).requires_grad_()
    head = torch.randn((VOCAB, WIDTH), generator=generator).to(dtype).requires_grad_()
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden, head, tokens, torch.randn(ROWS, generator=generator)


def _plain(hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    distribution = ((hidden.double() @ head.double().t()) / temperature).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=distribution.detach()).entropy()
    return distribution.gather(-1, tokens[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("as_engine", ORDERS)
def test_values_and_gradients_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, kept: int, temperature: float, as_engine: bool
) -> None:
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", kept)
    monkeypatch.setattr(logprobs, "BLOCK_LOGITS", 1)  # blocks of the fewest rows
    hidden, head, tokens, weight = _case()
    chosen, entropy = head_logprobs(hidden, head, tokens, temperature, as_engine=as_engine)
    wanted, wanted_entropy = _plain(hidden, head, tokens, temperature)
    torch.testing.assert_close(chosen.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad
    ours = torch.autograd.grad((chosen * weight).sum(), (hidden, head))
    theirs = torch.autograd.grad((wanted * weight).sum(), (hidden, head))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1500])
def test_the_engines_log_probabilities_are_those_of_its_log_softmax(vocab_size: int) -> None:
    logits = torch.randn((7, vocab_size), generator=torch.Generator().manual_seed(0)) * 5
    tokens = torch.arange(7) % vocab_size
    whole = calls.log_softmax(logits, 1)
    distribution = torch.empty_like(logits)
    chosen, entropy, log_sums = calls.choose_tokens(logits, tokens, distribution)
    assert torch.equal(chosen, whole.gather(-1, tokens[:, None]).squeeze(-1))
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_sums, logits.logsumexp(-1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(distribution, logits.softmax(-1), atol=1e-7, rtol=1e-5)
    assert torch.equal(calls.choose_tokens(logits, tokens)[0], chosen), "kept or not"
    assert calls.choose_tokens(logits[:2], torch.tensor([-1, vocab_size]))[0].isnan().all()


@pytest.mark.parametrize("as_engine", ORDERS)
def test_extreme_logits_stay_finite(as_engine: bool) -> None:
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    chosen, entropy = head_logprobs(hidden, head, torch.tensor([0, 0, 1]), 1.0, as_engine=as_engine)
    assert chosen.tolist() == pytest.approx([0.0, -2e4, -1.0986123])
    assert entropy.tolist() == pytest.approx([0.0, 0.0, 1.0986123])
    chosen.sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


def test_bfloat16_is_summed_in_float32() -> None:
    hidden, head, tokens, weight = _case(torch.bfloat16)
    chosen, _ = head_logprobs(hidden, head, tokens, 1.0)
    wanted, _ = _plain(hidden, head, tokens, 1.0)
    assert chosen.dtype == torch.float32
    torch.testing.assert_close(chosen.double(), wanted, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((chosen * weight).sum(), (hidden, head))
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


def test_frozen_heads_and_frozen_bodies_get_no_gradient() -> None:
    hidden, head, tokens, _ = _case()
    chosen, _ = head_logprobs(hidden, head.detach(), tokens, 1.0)
    chosen.sum().backward()
    assert hidden.grad is not None and head.grad is None
    head_logprobs(hidden.detach(), head, tokens, 1.0)[0].sum().backward()
    assert head.grad is not None


def test_blocks_of_any_head_have_the_bits_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, tokens, weight = _case()

    def row_by_row(rows: Tensor) -> Tensor:
        return (rows[:, None, :] * head).sum(-1)

    def compute() -> tuple[Tensor, ...]:
        chosen, entropy = checkpointed_logprobs(
            row_by_row, lambda logits: logits.log_softmax(-1), hidden, tokens, 0.7, VOCAB
        )
        return chosen, entropy, *torch.autograd.grad((chosen * weight).sum(), (hidden, head))

    whole = compute()
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", 0)
    monkeypatch.setattr(logprobs, "BLOCK_LOGITS", 1)
    blocks = compute()
    for a, b in zip(whole[:3], blocks[:3], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(whole[3], blocks[3])
