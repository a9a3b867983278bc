"""The native forward pass computes what the module computes, and is there only where it compiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.controller.compute import choose_kernels
from etude.errors import ResourceError
from etude.inference.cache import KvCache
from etude.inference.forward import EagerForward, ForwardPass, StepRows
from etude.inference.native import NativeForward, find_compiler, load_library
from etude.model import Qwen3Moe
from etude.records import SamplingParams
from tests.inference.builders import needs_compiler
from tests.model.builders import VOCAB, small_config, small_model

SLOTS, POSITIONS = 5, 60


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is compiled yet; what is compiled goes to the returned directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    yield tmp_path / "etude"
    load_library.cache_clear()


def step_rows(decode: list[int], prefill: list[int], starts: list[int], counts: list[int]) -> StepRows:
    return StepRows(*(np.array(x, dtype=np.int64) for x in (decode, prefill, starts, counts)), num_live=SLOTS)


def compute(forward: ForwardPass, rows: StepRows, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`tokens` [slots, positions] -> hidden states and routes of the step."""
    slots, positions = torch.from_numpy(rows.slots), torch.from_numpy(rows.positions)
    return forward(tokens[slots, positions], slots, positions, rows)


STEPS = [
    step_rows([], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0], [7, 1, 20, 33, 2]),
    step_rows([0, 2, 4], [1, 3], [7, 20, 2, 1, 33], [1, 1, 1, 9, 13]),
    step_rows([0, 1, 2, 3, 4], [], [8, 10, 21, 46, 3], [1, 1, 1, 1, 1]),
    step_rows([3], [], [47], [1]),
]

SHAPES = [
    {},
    {"hidden_size": 76, "num_heads": 3, "num_kv_heads": 3, "head_dim": 10, "expert_size": 12},
    {"hidden_size": 132, "num_heads": 8, "head_dim": 64, "experts_per_token": 1, "num_layers": 1},
    {"num_experts": 40, "experts_per_token": 6, "expert_size": 96, "num_heads": 4, "num_kv_heads": 2},
]


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_keys_and_routes_are_those_of_the_module(shape: dict[str, int]) -> None:
    model = small_model(3, **shape)
    caches = [KvCache(model.config, SLOTS, POSITIONS) for _ in range(2)]
    eager, native = EagerForward(model, caches[0]), NativeForward(model, caches[1])
    tokens = torch.randint(0, VOCAB, (SLOTS, POSITIONS), generator=torch.Generator().manual_seed(0))
    for rows in STEPS:
        expected, expected_routes = compute(eager, rows, tokens)
        hidden, routes = compute(native, rows, tokens)
        torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=1e-4)
        assert torch.equal(routes, expected_routes)
    torch.testing.assert_close(caches[1].keys, caches[0].keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(caches[1].values, caches[0].values, atol=1e-4, rtol=1e-4)


@needs_compiler
def test_the_bits_of_a_row_do_not_depend_on_the_others() -> None:
    model = small_model(4)
    tokens = torch.randint(0, VOCAB, (SLOTS, POSITIONS), generator=torch.Generator().manual_seed(1))
    together, _ = compute(NativeForward(model, KvCache(model.config, SLOTS, POSITIONS)), STEPS[0], tokens)
    first = 0
    for slot, count in zip(STEPS[0].prefill.tolist(), STEPS[0].counts.tolist(), strict=True):
        alone = NativeForward(model, KvCache(model.config, SLOTS, POSITIONS))
        for position in range(count):
            hidden, _ = compute(alone, step_rows([slot], [], [position], [1]), tokens)
            assert torch.equal(hidden[0], together[first + position])
        first += count


@needs_compiler
@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_threads_change_no_bit(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.native.forward.MIN_ROWS_PER_THREAD", 2)
    model = small_model(4)
    tokens = torch.randint(0, VOCAB, (SLOTS, POSITIONS), generator=torch.Generator().manual_seed(2))
    one = NativeForward(model, KvCache(model.config, SLOTS, POSITIONS))
    many = NativeForward(model, KvCache(model.config, SLOTS, POSITIONS), num_threads)
    for rows in STEPS:
        expected, expected_routes = compute(one, rows, tokens)
        hidden, routes = compute(many, rows, tokens)
        assert torch.equal(hidden, expected)
        assert torch.equal(routes, expected_routes)


@needs_compiler
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.5])
def test_tokens_and_logprobs_are_those_of_the_sampler(temperature: float) -> None:
    model = small_model(8)
    cache = KvCache(model.config, SLOTS, POSITIONS)
    source = np.random.default_rng(0)
    hidden = torch.from_numpy(source.normal(size=(300, model.config.hidden_size))).float()
    params, draws = [SamplingParams(temperature=temperature)] * 300, source.random(300)
    tokens, logprobs = NativeForward(model, cache).sample(hidden, params, draws)
    expected, expected_logprobs = EagerForward(model, cache).sample(hidden, params, draws)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)
    cut = [SamplingParams(temperature=0.6, top_k=1)] * 300
    assert torch.equal(
        NativeForward(model, cache).sample(hidden, cut, draws)[0], model.logits(hidden).argmax(-1)
    )


@needs_compiler
def test_changed_weights_count_once_they_are_loaded() -> None:
    model, other = small_model(5), small_model(6)
    tokens = torch.randint(0, VOCAB, (SLOTS, POSITIONS))
    native = NativeForward(model, KvCache(model.config, SLOTS, POSITIONS))
    expected, _ = compute(NativeForward(other, KvCache(model.config, SLOTS, POSITIONS)), STEPS[0], tokens)
    model.load_state_dict(other.state_dict())
    native.load_weights()
    assert torch.equal(compute(native, STEPS[0], tokens)[0], expected)


@needs_compiler
def test_heads_too_wide_for_it_are_refused_by_name() -> None:
    config = small_config(head_dim=512)
    with pytest.raises(ResourceError) as caught:
        NativeForward(Qwen3Moe(config, VOCAB), KvCache(config, 1, 8))
    assert caught.value.field == "model.head_dim"


def test_without_a_compiler_the_choice_falls_on_the_module_unless_native_is_demanded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_library: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    assert choose_kernels("auto") == "eager"
    with pytest.raises(ResourceError, match="no C compiler") as caught:
        choose_kernels("native")
    assert caught.value.field == "engine.kernels"


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_library: Path
) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ResourceError, match="no space left"):
        load_library()
    assert choose_kernels("auto") == "eager"
    assert list(fresh_library.iterdir()) == []


def test_cc_may_carry_options_and_stands_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-cc"
    compiler.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} -m64")
    assert find_compiler() == [str(compiler), "-m64"]
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    assert find_compiler() is None


def test_a_compiler_that_writes_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, fresh_library: Path
) -> None:
    monkeypatch.setenv("CC", "true")
    with pytest.raises(ResourceError, match="it wrote no library"):
        load_library()


@needs_compiler
def test_it_is_compiled_once_and_loaded_from_then_on(fresh_library: Path) -> None:
    load_library()
    (library,) = fresh_library.iterdir()
    made = library.stat().st_mtime_ns
    load_library.cache_clear()
    load_library()
    assert [path.stat().st_mtime_ns for path in fresh_library.iterdir()] == [made]
