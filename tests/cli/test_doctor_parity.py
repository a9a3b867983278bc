"""`etude doctor parity`: verdict, table, JSON and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.model.huggingface import save_model
from tests.cli.commands import etude
from tests.inference.builders import needs_compiler
from tests.model.builders import small_model

SMALL = ("--tokens", "40", "--sequences", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts without a tokenizer."""
    directory = tmp_path_factory.mktemp("checkpoint")
    save_model(small_model(), directory)
    return directory


def test_sides_that_agree_pass_with_a_table(checkpoint: Path) -> None:
    result = etude("doctor", "parity", str(checkpoint), "--kernels", "eager", *SMALL)
    assert result.exit_code == 0, result.output
    assert "passed: k3 within 0.001" in result.stdout
    assert "sampled, routes replayed" in result.stdout
    assert "positions with different experts: 0.000%" in result.stdout


def test_sides_that_are_too_far_apart_exit_with_1(checkpoint: Path) -> None:
    result = etude("doctor", "parity", str(checkpoint), "--kernels", "eager", "--limit", "0", *SMALL)
    assert result.exit_code == 1, result.output
    assert "failed: not k3 within 0" in result.stdout


@needs_compiler
def test_invariant_numerics_want_every_bit_and_have_it(checkpoint: Path) -> None:
    result = etude("doctor", "parity", str(checkpoint), "--numerics", "invariant", "--json", *SMALL)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["passed"]
    assert found["routes_differing"] == 0.0
    assert {one["max"] for one in found["figures"].values()} == {0.0}
    assert all(one["num_tokens"] > 40 for one in found["figures"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "other"), "is not one of 'etude', 'vllm'"),
        (("--kernels", "fast"), "is not one of 'auto', "),
        (("--cache-dtype", "float16"), "is not one of 'auto', "),
        (("--weight-dtype", "bfloat16", "--kernels", "eager"), "engine.weight_dtype"),
        (("--tokens", "128"), "exceeds the model's longest sequence"),
        (("--engine", "vllm"), "neither an interpreter to start vLLM with"),
        (("--text", "missing.txt"), "tokenizer"),
        (("--numerics", "invariant", "--kernels", "eager"), "engine.kernels"),
    ],
)
def test_mistakes_are_told(checkpoint: Path, options: tuple[str, ...], message: str) -> None:
    result = etude("doctor", "parity", str(checkpoint), *SMALL, *options)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    result = etude("doctor", "parity", str(tmp_path))
    assert result.exit_code == 2
    assert "is not a model directory" in result.output


def test_the_doctor_itself_is_as_before() -> None:
    assert "kernels" in json.loads(etude("doctor", "--json").stdout)
