"""What does not fit together is refused before native code reads or writes beyond the end of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from etude.model.kernels.native import calls, find_compiler, mixture, pointwise, training
from etude.model.kernels.native.matrices import pack

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
ROWS = torch.zeros((6, 2, 8))
X, CHOSEN, WEIGHTS = torch.zeros((6, 8)), torch.zeros((6, 2), dtype=torch.int64), torch.zeros((6, 2))
GATE_UP, DOWN = torch.zeros((3, 8, 10)), torch.zeros((3, 5, 8))


@pytest.mark.parametrize(
    "call",
    [
        lambda: training.multiply(X, X, torch.zeros((6, 8))),
        lambda: training.multiply(X, X.t(), torch.zeros((6, 7))),
        lambda: training.attend(ROWS, ROWS, ROWS, np.array([0, 7])),
        lambda: training.attend(ROWS, ROWS[:5], ROWS, np.array([0, 6])),
        lambda: training.attend(ROWS, ROWS[..., :7], ROWS, np.array([0, 6])),
        lambda: calls.PackedPages([5]).attend(ROWS, ROWS, ROWS),
        lambda: calls.PackedPages([6]).attend(ROWS, ROWS, ROWS[:, :1]),
        lambda: calls.linear(pack([torch.zeros((9, 4))]), X, 1),
        lambda: calls.choose_tokens(X, torch.zeros(6, dtype=torch.int32)),
        lambda: calls.choose_tokens(X, torch.zeros(5, dtype=torch.int64)),
        lambda: mixture.mix(X, GATE_UP, DOWN, CHOSEN[:5], WEIGHTS[:5], as_engine=True),
        lambda: mixture.mix(X, GATE_UP, DOWN, CHOSEN.int(), WEIGHTS, as_engine=True),
        lambda: mixture.mix(X[:, :7], GATE_UP, DOWN, CHOSEN, WEIGHTS, as_engine=True),
        lambda: pointwise.rms_norm(X, torch.zeros(7), 1e-6),
        lambda: pointwise.silu_gate(X, X[:5]),
    ],
)
def test_operands_that_do_not_fit_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        call()
