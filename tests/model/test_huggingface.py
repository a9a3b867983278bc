"""Hugging Face directories: equal logits in transformers, exact round trips, damage refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.config import ModelConfig
from etude.errors import CheckpointError
from etude.model import LanguageModel, PackedAttention
from etude.model.huggingface import load_model, save_model


def _model(seed: int = 0) -> LanguageModel:
    config = ModelConfig(num_layers=2, hidden_size=64, expert_size=32, head_dim=16, initializer_range=0.1)
    model = LanguageModel(config, 300)
    model.initialise(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(seed))
    return model


def test_transformers_loads_the_directory_with_equal_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = _model()
    save_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 300, 40))
    with torch.no_grad():
        hidden = model(tokens, torch.arange(40), PackedAttention([40]))
        ours = model.logits(hidden)
        reference = theirs(tokens[None]).logits[0]
    assert ours.std() > 0.3
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


def test_a_saved_model_loads_bit_for_bit(tmp_path: Path) -> None:
    model = _model(3)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config.num_layers == 2
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "nan", "truncated", "architecture"])
def test_a_damaged_directory_is_refused_with_the_field(tmp_path: Path, damage: str) -> None:
    save_model(_model(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = tensors["model.norm.weight"]
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "extra":
        tensors["model.surplus"] = norm.clone()
    elif damage == "shape":
        tensors["model.norm.weight"] = norm[:-1]
    elif damage == "nan":
        tensors["model.norm.weight"] = norm * float("nan")
    save_file(tensors, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    if damage == "architecture":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert caught.value.field
