"""GGUF files give the models that they were made from; unsupported ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.model.gguf_file import GgufFile
from etude.model.huggingface import load_model
from etude.model.huggingface.checkpoint import fill_model, outline_model
from etude.model.huggingface.fields import parse_fields
from tests.model.gguf_builder import gguf_package, write_gguf
from tests.model.reference import reference_model

gguf_package()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(path: Path) -> LanguageModel:
    file = GgufFile(path)
    return fill_model(outline_model(parse_fields(file.config()), torch.float32), file)


@pytest.mark.parametrize("variant", ["dense", "dense_tied", "biased", "llama", "mistral"])
def test_a_file_holds_the_model_that_it_was_made_from(tmp_path: Path, variant: str) -> None:
    theirs = reference_model(variant)
    theirs.save_pretrained(tmp_path / "model")
    if variant == "mistral":  # which is Llama to llama.cpp
        theirs.config.model_type = "llama"
    write_gguf(tmp_path / "model.gguf", theirs)
    expected, found = load_model(tmp_path / "model"), read(tmp_path / "model.gguf")
    ignored = {"initializer_range"}
    assert found.config.model_dump(exclude=ignored) == expected.config.model_dump(exclude=ignored)
    for (name, ours), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours, other), name


def _divisors(theirs: Any, scaling: dict[str, Any]) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter writes them: from transformers' frequencies, with and without scaling."""
    plain = 1.0 / scaling["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    return (plain / theirs.model.rotary_emb.inv_freq).numpy()


def test_how_llama_3_stretches_positions_is_found_in_its_divisors(tmp_path: Path) -> None:
    theirs = reference_model("llama", rope_parameters=LLAMA3)
    divisors = _divisors(theirs, LLAMA3)
    write_gguf(tmp_path / "a.gguf", theirs, tensors=lambda t: t.update({"rope_freqs.weight": divisors}))
    theirs.save_pretrained(tmp_path / "model")
    model, expected = read(tmp_path / "a.gguf"), load_model(tmp_path / "model")
    assert model.config.rope_scaling == "llama3" and model.config.rope_factor == 8.0
    assert torch.equal(model.get_buffer("cosine"), expected.get_buffer("cosine"))
    other = divisors * np.linspace(1, 2, len(divisors), dtype=np.float32)
    write_gguf(tmp_path / "b.gguf", theirs, tensors=lambda t: t.update({"rope_freqs.weight": other}))
    with pytest.raises(CheckpointError, match="scales positions") as caught:
        read(tmp_path / "b.gguf")
    assert caught.value.field == "rope_freqs.weight"


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_quantised_weights_are_those_of_the_gguf_package(tmp_path: Path, quantisation: str) -> None:
    gguf = gguf_package()
    theirs = reference_model("dense", intermediate_size=64)
    write_gguf(tmp_path / "a.gguf", theirs, quantisation=quantisation)
    kind = gguf.GGMLQuantizationType[quantisation]
    exact = theirs.model.embed_tokens.weight.detach()
    expected = gguf.dequantize(gguf.quantize(exact.numpy(), kind), kind)
    assert np.array_equal(read(tmp_path / "a.gguf").embedding.detach().numpy(), expected)
    assert not np.array_equal(expected, exact.numpy())


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, array: np.ndarray[Any, Any]) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: array})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tensors": _without("blk.1.ffn_up.weight")}, "tensors"),
        ({"tensors": _with("blk.0.attn_sinks.weight", np.ones(4))}, "tensors"),
        (
            {"tensors": _with("blk.0.attn_q.weight", np.ones((32, 32)))},
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ({"metadata": {"llama.block_count": 2}}, "tensors"),
        ({"metadata": {"llama.block_count": 4}}, "tensors"),
        ({"metadata": {"llama.attention.head_count": 16}}, "model.layers.0.self_attn.o_proj.weight"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"metadata": {"llama.attention.sliding_window": 64}}, "llama.attention.sliding_window"),
        ({"metadata": {"split.count": 3}}, "a.gguf"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "config.json: rope_type"),
    ],
)
def test_what_contradicts_itself_or_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    write_gguf(tmp_path / "a.gguf", reference_model("llama"), **changes)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "a.gguf")
    assert caught.value.field == field and caught.value.received and caught.value.fix


def test_other_architectures_and_types_are_refused_by_name(tmp_path: Path) -> None:
    theirs = reference_model("llama")
    theirs.config.model_type = "gemma3"
    write_gguf(tmp_path / "a.gguf", theirs)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "a.gguf")
    assert (caught.value.field, caught.value.received) == ("general.architecture", "gemma3")


@pytest.mark.parametrize("damage", ["truncated", "empty", "magic", "type"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, reference_model("llama"))
    whole = path.read_bytes()
    name = b"token_embd.weight"
    kind = whole.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and two of them
    changed = {
        "truncated": whole[:-5000],
        "empty": b"",
        "magic": b"GGML" + whole[4:],
        "type": whole[:kind] + (99).to_bytes(4, "little") + whole[kind + 4 :],
    }
    path.write_bytes(changed[damage])
    with pytest.raises(CheckpointError, match=r"is not a GGUF file|cannot be read as GGUF") as caught:
        read(path)
    assert caught.value.field == "a.gguf" and caught.value.fix
