"""Threads share a step's micro-batches: not a bit of the model depends on how many."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config import AdapterConfig
from etude.model import LanguageModel
from etude.model.kernels.native import training
from etude.training import NextTokenTrainer, ShuffledDocuments
from etude.training import threads as training_threads
from etude.training.packing import pack_sequences
from etude.training.threads import count_batches, map_in_order, share_threads
from tests.model.builders import small_model
from tests.training.builders import Rollouts, midtrain_config, midtrain_documents, rl_config, trainer_of

Trained = tuple[LanguageModel, list[Mapping[str, float]]]


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def midtrain(**changes: Any) -> Trained:
    model = small_model()
    batches = ShuffledDocuments(midtrain_documents(), 100, 0)
    trainer = NextTokenTrainer(model, batches, midtrain_config(micro_batch_tokens=40, **changes))
    return model, [trainer.step() for _ in range(3)]


def reinforce(**changes: Any) -> Trained:
    rollouts = Rollouts(small_model())
    config = rl_config(micro_batch_tokens=40, updates_per_step=2, router_replay="r2", **changes)
    trainer = trainer_of(config, rollouts)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    groups = [rollouts.group([1.0, 0.0, 0.0, 1.0]) for _ in range(4)]
    torch.set_num_threads(num_threads)
    figures = [trainer.step(groups)]
    if trainer.adapters is not None:
        trainer.adapters.merge()
    return trainer.model, figures


def adapt() -> Trained:
    return reinforce(adapter=AdapterConfig(rank=4, alpha=16.0))


def on(num_threads: int, train: Callable[[], Trained]) -> Trained:
    torch.set_num_threads(num_threads)
    model, figures = train()
    assert torch.get_num_threads() == num_threads
    return model, [{k: v for k, v in values.items() if not k.endswith("_s")} for values in figures]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("train", [midtrain, reinforce, adapt])
def test_no_bit_of_training_depends_on_the_number_of_threads(
    train: Callable[[], Trained], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":  # as without a compiler
        monkeypatch.setattr(training, "_lanes", lambda: 0)
        monkeypatch.setattr(training, "_outruns_mkl", lambda: False)
    model, figures = on(1, train)
    before = small_model()
    assert any(not torch.equal(p, before.get_parameter(n)) for n, p in model.named_parameters())
    for num_threads in (2, 3):
        other, same = on(num_threads, train)
        assert figures == same
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, other.get_parameter(name)), name


LOCKS = """
import faulthandler, sys
import torch
from torch import nn
from etude.training.threads import add_gradients

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-5)
torch.set_num_threads(1)
weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(100)])
for _ in range(5):
    weights.zero_grad()
    add_gradients(weights, lambda item: (sum(w * item for w in weights).sum(), item), list(range(64)), 2)
print(int(weights[0].grad), sum(range(64)))
"""


def test_threads_and_their_caller_do_not_wait_for_each_others_locks() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKS], capture_output=True, text=True, check=False)
    assert done.stdout == "2016 2016\n", done.stderr


def test_results_come_in_order_whoever_is_first() -> None:
    second = threading.Event()

    def compute(item: int) -> tuple[int, int]:
        if item == 0:
            assert second.wait(30), "a second thread computes meanwhile"
        else:
            second.set()
        return item, torch.get_num_threads()

    torch.set_num_threads(2)
    assert list(map_in_order(compute, range(9), 2)) == [(item, 1) for item in range(9)]
    assert torch.get_num_threads() == 2


def test_an_error_ends_the_step_when_nothing_computes_any_more() -> None:
    computing: set[int] = set()

    def compute(item: int) -> None:
        computing.add(item)
        try:
            if item == 1:
                raise ValueError("one")
        finally:
            computing.remove(item)

    with pytest.raises(ValueError, match="one"):
        list(map_in_order(compute, range(20), 3))
    assert not computing


def test_a_step_is_cut_by_its_sequences_alone() -> None:
    assert count_batches(20, 3_000) == 3
    assert count_batches(2, 3_000) == 2, "not finer than its sequences"
    assert count_batches(1, 100) == 1
    lengths = [100, 90, 80, 70, 60, 50]
    (plan,) = pack_sequences(lengths, 1_000, least_batches=3)
    assert sorted(sum(lengths[i] for i in batch) for batch in plan) == [150, 150, 150]


def test_a_beginning_that_all_share_is_computed_in_few_micro_batches() -> None:
    assert count_batches(16, 16 * 1_200, 450) == 6, "2,700 rows of it beside 12,000 others"
    assert count_batches(16, 16 * 1_200, 1_000) == 2, "one for each of two threads at any rate"
    assert count_batches(1, 1_200, 400) == 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be asked to")
@pytest.mark.parametrize("is_scarce", [True, False])
def test_what_a_step_freed_goes_back_where_memory_is_scarce(
    monkeypatch: pytest.MonkeyPatch, is_scarce: bool
) -> None:
    total = training_threads.total_memory_bytes()
    monkeypatch.setattr(training_threads, "available_memory_bytes", lambda: 0 if is_scarce else total)
    with share_threads(split=False):
        pieces = [bytes([1]) * 60_000 for _ in range(2000)]
        kept = pieces[::100]  # between what is freed lies what is in use
        before = resident_bytes()
        del pieces
    assert (before - resident_bytes() > 60_000_000) == is_scarce
    assert len(kept) == 20
