"""The parity benchmark at small size: its arms differ as intended, and its figure is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parity_learning
import parity_plot
import pytest
import torch

from tests.inference.builders import needs_compiler

FIGURES = {"k3": 1e-7, "p99": 1e-3, "max": 1e-2, "differing": 0.5, "num_tokens": 10.0, "num_sequences": 1.0}


@needs_compiler
def test_only_engines_that_err_are_apart_and_all_begin_alike() -> None:
    first = parity_learning.initial_weights(2)
    names = [f"{engine}: replay, TIS" for engine in parity_learning.ENGINES]
    curves = {name: parity_learning.learn(name, 0, 1, first, 1e-3) for name in ("exact", *names)}
    assert {curve.accuracy[0] for curve in curves.values()} == {curves["exact"].accuracy[0]}
    assert curves["exact"].k3 == [0.0]
    assert all(curves[name].k3[0] > 0 for name in names)
    assert all(len(curve.steps) == len(curve.accuracy) for curve in curves.values())


@needs_compiler
def test_what_the_trainer_does_about_an_engine_is_seen_in_its_next_weights() -> None:
    first = parity_learning.initial_weights(2)
    names = [f"router noise 1: {treatment}" for treatment in ("nothing", "ratio", "replay, ratio")]
    k3 = [parity_learning.learn(name, 0, 2, first, 3e-3).k3 for name in names]
    assert len({one[0] for one in k3}) == 1, "the first step samples before anything was done"
    assert len({one[1] for one in k3}) == len(names)


def test_noise_is_of_the_size_that_is_asked_for() -> None:
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    added = parity_learning.with_noise(matrix, 0.3, torch.Generator().manual_seed(1)) - matrix
    assert float(added.std() / matrix.std()) == pytest.approx(0.3, rel=0.05)


def test_rounding_keeps_vectors_and_leaves_rows_of_matrices_few_values() -> None:
    matrix = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    rounded = parity_learning.to_few_bits(matrix, 3)
    assert all(len(row.unique()) <= 7 for row in rounded)
    torch.testing.assert_close(rounded.abs().amax(-1), matrix.abs().amax(-1))
    vector = torch.randn(8)
    assert torch.equal(parity_learning.to_few_bits(vector, 3), vector)


def test_answers_are_partners_of_the_prompt() -> None:
    partners, given = parity_learning.partners(), parity_learning.prompts(3, 0)
    assert sorted(partners.tolist()) == list(range(parity_learning.SYMBOLS))
    assert given.shape == (3, parity_learning.LENGTH + 2)
    assert not np.array_equal(given, parity_learning.prompts(3, 1))


@pytest.mark.slow
def test_the_picture_is_drawn_and_the_same_twice(tmp_path: Path) -> None:
    both = {"sampled": FIGURES, "sampled, routes replayed": {**FIGURES, "k3": 0.0}}
    mismatch = {"float32": {"by_micro_batch": {"1": {"figures": both}}, "between_micro_batches": 0.0}}
    curve = {"steps": [0, 5], "accuracy": [[0.4, 0.6], [0.4, 0.7]]}
    curves = {"exact": curve, "3 bits: nothing": curve}
    path = tmp_path / "parity.svg"
    parity_plot.draw(path, mismatch, curves)
    first = path.read_bytes()
    parity_plot.draw(path, mismatch, curves)
    assert path.read_bytes() == first, "the same figures give the same file"
    assert "right symbols" in path.read_text()
