"""Layers for multi-token prediction: read from a checkpoint, and computed as transformers computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.errors import CheckpointError
from etude.model import DraftLayers, PackedAttention
from etude.model.huggingface import load_draft_layers, load_model
from tests.model.reference import our_logits, reference_checkpoint, tokens_of

FIRST = 3
"""Layers of the reference checkpoints: draft layers are numbered on from here."""


def _with_draft_layers(directory: Path, variant: str, count: int) -> tuple[Any, Any]:
    """A checkpoint with draft layers as DeepSeek names them, and transformers' models of both."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    reference_checkpoint(directory, variant, num_nextn_predict_layers=count)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    for index in range(FIRST, FIRST + count):
        for name in [name for name in tensors if name.startswith(f"model.layers.{FIRST - 1}.")]:
            copied = name.replace(f".{FIRST - 1}.", f".{index}.", 1)
            tensors[copied] = tensors[name] + draw(*tensors[name].shape)
        prefix = f"model.layers.{index}"
        tensors[f"{prefix}.eh_proj.weight"] = draw(32, 64)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + draw(32)
        tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    # transformers knows the number of the draft layer of the published model alone.
    theirs._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{FIRST + i}\..*" for i in range(count)]
    return theirs, MtpModel.from_pretrained(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["latent", "latent_yarn", "latent_halves"])
@pytest.mark.parametrize("count", [1, 2])
def test_draft_layers_compute_what_those_of_transformers_compute(
    tmp_path: Path, variant: str, count: int
) -> None:
    theirs, their_drafts = _with_draft_layers(tmp_path, variant, count)
    model, drafts = load_model(tmp_path), load_draft_layers(tmp_path)
    assert drafts is not None and len(drafts.layers) == count
    tokens, length = tokens_of(40), 40 - count
    with torch.no_grad():
        hidden = model(tokens[:length], torch.arange(length), PackedAttention([length]))
        their_hidden = theirs.model(tokens[None, :length]).last_hidden_state
        for index in range(count):
            following = tokens[index + 1 : index + 1 + length]
            positions = torch.arange(index + 1, index + 1 + length)
            hidden = drafts(model, index, hidden, following, positions, PackedAttention([length]))
            their_hidden = their_drafts.forward_layer(
                index, their_hidden, positions[None], None, input_ids=following[None]
            )
            torch.testing.assert_close(hidden, their_hidden[0], rtol=1e-4, atol=2e-4)
            assert (hidden - drafts.layers[index].final_norm).std() > 0.1
    logits = model.logits(hidden)
    torch.testing.assert_close(logits, theirs.lm_head(their_hidden)[0], rtol=1e-4, atol=1e-3)


def test_a_model_is_the_same_with_and_without_draft_layers(tmp_path: Path) -> None:
    _with_draft_layers(tmp_path / "with", "latent", 1)
    reference_checkpoint(tmp_path / "without", "latent")
    a, b = load_model(tmp_path / "with"), load_model(tmp_path / "without")
    assert torch.equal(our_logits(a, tokens_of(20)), our_logits(b, tokens_of(20)))
    assert dict(a.named_parameters()).keys() == dict(b.named_parameters()).keys()
    assert load_draft_layers(tmp_path / "without") is None


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "nan"])
def test_damaged_draft_layers_are_refused(tmp_path: Path, damage: str) -> None:
    _with_draft_layers(tmp_path, "latent", 1)
    path, name = tmp_path / "model.safetensors", f"model.layers.{FIRST}.enorm.weight"
    tensors = load_file(path)
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors[f"model.layers.{FIRST}.surplus"] = torch.ones(1)
    else:
        tensors[name] = tensors[name][:-1] if damage == "shape" else tensors[name] * float("nan")
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_draft_layers(tmp_path)
    assert caught.value.field == ("tensors" if damage in ("missing", "extra") else name)


def test_draft_layers_have_a_cache_of_their_own(tmp_path: Path) -> None:
    """Their layers are counted from 0, and all of them route."""
    reference_checkpoint(tmp_path, "latent")
    drafts = DraftLayers(load_model(tmp_path).config, 2)
    assert (drafts.config.num_layers, drafts.config.num_moe_layers) == (2, 2)
    assert [layer.block.layer for layer in drafts.layers] == [0, 1]  # type: ignore[union-attr]
