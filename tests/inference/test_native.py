"""The native forward pass computes what the module computes, and is available only if it compiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.controller.compute import choose_kernels
from etude.errors import ResourceError
from etude.inference import Engine
from etude.inference.forward import EagerForward
from etude.inference.native import NativeForward
from etude.model import LanguageModel, build_model
from etude.model.huggingface import load_model
from etude.model.kernels.native import load_library
from etude.native import find_compiler
from etude.records import SamplingParams
from tests.inference.builders import Client, drain, serve
from tests.inference.native_steps import Sequences, cache_for, needs_compiler, random_sequences
from tests.model.builders import LATENT, PLAIN_LATENT, VOCAB, small_config
from tests.model.reference import VOCAB as REFERENCE_VOCAB
from tests.model.reference import reference_checkpoint, tokens_of

LENGTHS = [16, 21, 33, 133, 5]
SHAPES: list[dict[str, Any]] = [
    {},
    {"architecture": "qwen3", "intermediate_size": 40, "tie_embeddings": False},
    {"architecture": "llama", "hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    {"architecture": "qwen2", "num_heads": 4, "num_kv_heads": 2},
    {"hidden_size": 76, "num_heads": 3, "num_kv_heads": 3, "head_dim": 10, "expert_size": 12},
    {"hidden_size": 132, "num_heads": 8, "head_dim": 64, "experts_per_token": 1, "num_layers": 1},
    {"num_experts": 40, "experts_per_token": 6, "expert_size": 96, "num_heads": 4, "num_kv_heads": 2},
    {"num_experts": 300, "norm_topk_prob": False},
    LATENT,
    PLAIN_LATENT,
]


def model_of(shape: dict[str, Any], seed: int = 3) -> LanguageModel:
    """Random weights, norms included."""
    model = build_model(small_config(**({"max_positions": 160} | shape)), VOCAB)
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.requires_grad_(requires_grad=False).parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is compiled yet; what is compiled goes to the returned directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    yield tmp_path / "etude"
    load_library.cache_clear()


STEPS = [
    {0: 7, 1: 1, 2: 20, 3: 100, 4: 2},
    {0: 1, 1: 9, 2: 1, 3: 13, 4: 1},
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    {3: 1},
]


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_keys_and_routes_are_those_of_the_module(shape: dict[str, Any]) -> None:
    model = model_of(shape)
    caches = [cache_for(model) for _ in range(2)]
    for cache in caches:  # the module multiplies what it does not see by 0
        cache.keys.zero_()
        if cache.values is not None:
            cache.values.zero_()
    eager, native = EagerForward(model, caches[0]), NativeForward(model, caches[1])
    sequences = random_sequences(LENGTHS, VOCAB)
    for counts in STEPS:
        rows = sequences.take(counts)
        expected, expected_routes = eager(rows)
        hidden, routes = native(rows)
        torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=1e-4)
        assert routes.dtype == expected_routes.dtype
        assert torch.equal(routes.int(), expected_routes.int())
    torch.testing.assert_close(caches[1].keys, caches[0].keys, atol=1e-4, rtol=1e-4)
    if caches[0].values is not None:
        torch.testing.assert_close(caches[1].values, caches[0].values, atol=1e-4, rtol=1e-4)


@needs_compiler
def test_what_is_computed_and_drawn_is_float32_whatever_type_new_tensors_have() -> None:
    model, params = model_of({}), [SamplingParams(top_p=0.9)] * 2

    def computed() -> list[torch.Tensor]:
        native = NativeForward(model, cache_for(model))
        hidden, _ = native(random_sequences([2], VOCAB).take({0: 2}))
        return [hidden, native.logits(hidden), *native.sample(hidden, params, np.full(2, 0.5))]

    expected, before = computed(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = computed()
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def alone(model: LanguageModel, sequences: Sequences) -> list[torch.Tensor]:
    """Hidden states of each sequence computed by itself, in one step."""
    fresh = Sequences(sequences.tokens, sequences.seed + 1)
    native = NativeForward(model, cache_for(model))
    return [native(fresh.take({s: len(tokens)}))[0] for s, tokens in enumerate(fresh.tokens)]


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_the_bits_of_a_row_depend_neither_on_the_others_nor_on_the_cut_nor_on_threads(
    shape: dict[str, Any], data: st.DataObject
) -> None:
    model = model_of(shape)
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=5))
    sequences = random_sequences(lengths, VOCAB, data.draw(st.integers(0, 1000)))
    expected = alone(model, sequences)
    native = NativeForward(model, cache_for(model), num_threads=data.draw(st.integers(1, 3)))
    native._threads_for = lambda work: native._num_threads  # type: ignore[method-assign]
    while any(sequences.computed[s] < lengths[s] for s in range(len(lengths))):
        left = {s: n - sequences.computed[s] for s, n in enumerate(lengths) if sequences.computed[s] < n}
        chosen = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        before = list(sequences.computed)
        counts = {s: data.draw(st.sampled_from([1, min(17, left[s]), left[s]])) for s in chosen}
        hidden, _ = native(sequences.take(counts))
        for s, part in zip(chosen, hidden.split(list(counts.values())), strict=True):
            assert torch.equal(part, expected[s][before[s] : before[s] + len(part)])


@needs_compiler
@pytest.mark.parametrize("variant", ["latent_direct", "latent_mscale"])
def test_greedy_tokens_of_latent_attention_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    theirs = reference_checkpoint(tmp_path, variant, seed=1)
    tokens = tokens_of(12, seed=1)
    expected = theirs.generate(tokens[None], do_sample=False, max_new_tokens=24, pad_token_id=0)[0].tolist()
    model = load_model(tmp_path).requires_grad_(requires_grad=False)
    engine = Engine(model.config, REFERENCE_VOCAB, 1, 64, 64, "native")
    serve(engine, model, 0)
    client = Client("one", 0)
    client.ask(engine, tokens.tolist(), max_tokens=24, temperature=0.0)
    drain(engine, [client])
    assert client.tokens == expected


@needs_compiler
def test_what_lies_behind_a_sequence_in_its_pages_is_never_read() -> None:
    model = model_of({})
    for hidden in alone(model, random_sequences([1, 15, 17, 65], VOCAB)):
        assert bool(hidden.isfinite().all())


@needs_compiler
@pytest.mark.parametrize("shape", [*SHAPES[:2], LATENT])
def test_weights_in_bfloat16_are_rounded_and_nothing_else_is(shape: dict[str, Any]) -> None:
    model, rounded = model_of(shape), model_of(shape)
    for name, parameter in rounded.named_parameters():
        if parameter.ndim > 1 and name != "embedding" and not name.endswith("router"):
            parameter.copy_(parameter.bfloat16().float())
    sequences = random_sequences([20], VOCAB)
    half = NativeForward(model, cache_for(model), weights="bfloat16")
    expected = alone(rounded, sequences)[0]
    assert torch.equal(half(sequences.take({0: 20}))[0], expected)


def hidden_rows(model: LanguageModel, count: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    source = np.random.default_rng(0)
    return torch.from_numpy(source.normal(size=(count, model.config.hidden_size))).float(), source.random(
        count
    )


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 3.0, "top_p": 0.999},
        {"top_k": 1},
        {"temperature": 0.0, "top_k": 2},
        {"temperature": 1e-40},
        {"top_p": 1e-50},
    ],
)
def test_tokens_and_logprobs_are_those_of_the_sampler(options: dict[str, Any]) -> None:
    model = model_of({}, 8)
    hidden, draws = hidden_rows(model, 300)
    params = [SamplingParams(**options) if row % 3 else SamplingParams() for row in range(300)]
    tokens, logprobs = NativeForward(model, cache_for(model), 2).sample(hidden, params, draws)
    expected, expected_logprobs = EagerForward(model, cache_for(model)).sample(hidden, params, draws)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_what_is_drawn_of_logits_that_are_no_numbers_is_a_token_all_the_same(options: dict[str, Any]) -> None:
    model = model_of({}, 8)
    hidden, draws = hidden_rows(model, 3)
    hidden[1] = float("nan")
    tokens, _ = NativeForward(model, cache_for(model)).sample(hidden, [SamplingParams(**options)] * 3, draws)
    assert all(0 <= token < VOCAB for token in tokens.tolist())


@needs_compiler
def test_a_row_is_drawn_alone_as_among_others() -> None:
    model = model_of({}, 8)
    hidden, draws = hidden_rows(model, 40)
    params = [SamplingParams(temperature=0.9, top_p=0.95)] * 40
    native = NativeForward(model, cache_for(model))
    tokens, logprobs = native.sample(hidden, params, draws)
    logits = native.logits(hidden)
    for row in range(40):
        one = slice(row, row + 1)
        token, logprob = native.sample(hidden[one], params[one], draws[one])
        assert (token[0], logprob[0]) == (tokens[row], logprobs[row])
        assert torch.equal(native.logits(hidden[one])[0], logits[row])


@needs_compiler
def test_changed_weights_count_once_they_are_loaded() -> None:
    model, other = model_of({}, 5), model_of({}, 6)
    sequences = random_sequences(LENGTHS, VOCAB)
    native = NativeForward(model, cache_for(model))
    expected = alone(other, sequences)
    model.load_state_dict(other.state_dict())
    native.load_weights()
    assert torch.equal(native(sequences.take({2: 33}))[0], expected[2])


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


@pytest.mark.slow
@needs_compiler
def test_it_is_compiled_once_and_loaded_from_then_on(fresh_library: Path) -> None:
    load_library()
    (library,) = fresh_library.iterdir()
    made = library.stat().st_mtime_ns
    load_library.cache_clear()
    load_library()
    assert [path.stat().st_mtime_ns for path in fresh_library.iterdir()] == [made]
