"""The team of native threads: shared by callers, lost in a fork, and without influence on any bit."""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.model.kernels.native import calls, find_compiler, training
from etude.model.kernels.native.matrices import PackedMatrices, pack

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
DEADLINE_S = 60.0


def operands() -> tuple[PackedMatrices, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return pack([torch.randn((96, 200), generator=generator)]), torch.randn((130, 96), generator=generator)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_products_are_right_whatever_the_number_of_threads(threads: int) -> None:
    weight, x = torch.randn((96, 203)), torch.randn((130, 96))
    out = calls.linear(pack([weight]), x, threads)
    torch.testing.assert_close(out, x @ weight, atol=1e-4, rtol=1e-4)
    assert torch.equal(out, calls.linear(pack([weight]), x, 1))


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    matrix, x = operands()
    expected = calls.linear(matrix, x, 1)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: calls.linear(matrix, x, 3), range(60))
        assert all(torch.equal(out, expected) for out in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    matrix, x = operands()
    expected = calls.linear(matrix, x, 3)
    child = os.fork()
    if child == 0:
        equal = all(torch.equal(calls.linear(matrix, x, 3), expected) for _ in range(3))
        os._exit(0 if equal else 1)
    deadline = time.monotonic() + DEADLINE_S
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done and status == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell")
def test_memory_of_threads_that_end_is_given_back() -> None:
    x, starts = torch.randn(512, 1, 2048), np.array([0, 512])

    def held_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def attend_in_threads(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=training.attend, args=(x, x, x, starts))
            thread.start()
            thread.join()

    attend_in_threads(5)
    before = held_bytes()
    attend_in_threads(30)  # each takes 8 MiB
    assert held_bytes() - before < 100 << 20


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    weight = torch.randn((64, 64))
    half = calls.linear(pack([weight], "bfloat16"), torch.eye(64), 1)
    assert torch.equal(half, weight.bfloat16().float())
