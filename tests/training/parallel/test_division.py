"""Divisions of a model that are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from etude.config import ModelConfig, RunConfig
from etude.config.parallel import ParallelConfig
from etude.errors import ConfigError
from etude.training.parallel.division import check_division


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        ({"num_experts": 6}, {"expert": 4}, "must divide the number of experts, which is 6"),
        ({"architecture": "qwen3"}, {"expert": 2}, "which is 0"),
        ({"num_heads": 6, "num_kv_heads": 2}, {"tensor": 3}, "of key heads, 2"),
        ({"expert_size": 12}, {"tensor": 2}, "model.expert_size = 12 into multiples of 4"),
        ({"architecture": "qwen3", "intermediate_size": 20}, {"tensor": 2}, "model.intermediate_size = 20"),
        ({"architecture": "deepseek_v3", "intermediate_size": 20}, {"tensor": 2}, "intermediate_size = 20"),
    ],
)
def test_what_does_not_divide_evenly_is_refused_with_the_number(
    model: dict[str, Any], parallel: dict[str, int], said: str
) -> None:
    ranks = ParallelConfig(ranks=next(iter(parallel.values())), **parallel)
    with pytest.raises(ConfigError, match=said) as raised:
        check_division(ModelConfig(**model), ranks)
    assert raised.value.field == f"parallel.{next(iter(parallel))}"


def test_widths_that_an_architecture_lacks_bind_nothing() -> None:
    check_division(ModelConfig(intermediate_size=4), ParallelConfig(ranks=2, tensor=2))
    check_division(ModelConfig(architecture="qwen3", expert_size=4), ParallelConfig(ranks=2, tensor=2))
    check_division(ModelConfig(architecture="deepseek_v3", num_kv_heads=1), ParallelConfig(ranks=4, tensor=4))


@pytest.mark.parametrize(
    ("others", "axis", "said"),
    [
        ({"numerics": "invariant"}, "tensor", 'must be 1 with numerics="invariant"'),
        ({"rl": {"adapter": {"rank": 4}}}, "tensor", "must be 1 with rl.adapter"),
        ({"rl": {"feedback": {"weight": 0.5}}}, "context", "must be 1 with rl.feedback"),
    ],
)
def test_what_needs_whole_sums_weights_or_sequences_is_refused_beside_ranks_that_cut_them(
    others: dict[str, Any], axis: str, said: str
) -> None:
    RunConfig.model_validate(others)
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(others | {"parallel": {"ranks": 2, axis: 2}})
