"""Memory of weights and caches: each tensor its own zeros, at a cache line, whatever was taken before."""

from __future__ import annotations

import pytest
import torch

from etude.model.kernels.native.matrices import StreamedMemory

SHAPES = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((9 << 20,), torch.float32), ((1,), torch.float32)]


def test_tensors_begin_at_cache_lines_and_do_not_share_memory() -> None:
    memory = StreamedMemory()
    taken = [memory.allocate(shape, dtype) for shape, dtype in SHAPES]
    for number, tensor in enumerate(taken):
        assert not tensor.any(), "nobody wrote here before"
        tensor.fill_(number + 1)
    for number, (tensor, (shape, dtype)) in enumerate(zip(taken, SHAPES, strict=True)):
        assert (tensor.shape, tensor.dtype, tensor.data_ptr() % 64) == (shape, dtype, 0)
        assert (tensor == number + 1).all()


@pytest.mark.parametrize("shape", [(0,), (2, 0, 4)])
def test_an_empty_tensor_takes_nothing(shape: tuple[int, ...]) -> None:
    memory = StreamedMemory()
    assert memory.allocate(shape).shape == shape
    assert memory.allocate((4,)).tolist() == [0.0] * 4


def test_a_tensor_keeps_its_values_when_the_others_and_the_memory_are_gone() -> None:
    memory = StreamedMemory()
    kept, *_ = [memory.allocate((1 << 20,)) for _ in range(20)]
    kept.fill_(3)
    del memory, _
    assert (kept == 3).all()
