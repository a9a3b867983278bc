"""Adapters on disk: what the peft library makes of them is the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from etude.config import AdapterConfig
from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.model.loading import AnyModel, save_any_model
from etude.model.lora import Adapters
from etude.model.peft import save_peft
from tests.model.builders import PLAIN_LATENT, small_model
from tests.model.test_lora import learned_adapters
from tests.model.transformers_builders import tiny_model

MODELS: dict[str, Any] = {
    "qwen3_moe": small_model,
    "qwen3": lambda: small_model(architecture="qwen3", intermediate_size=48),
    "mixtral": lambda: tiny_model("mixtral"),
    "gpt_oss": lambda: tiny_model("gpt_oss"),
}


def exported(make: Any, directory: Path, targets: tuple[str, ...]) -> tuple[AnyModel, Adapters]:
    """The base, its adapters and the merged model, each in a directory of its own."""
    model = make()
    save_any_model(model, directory / "base")
    adapters = learned_adapters(model, targets=targets)
    save_peft(adapters, model, directory / "adapter", str(directory / "base"))
    with adapters.merged():
        save_any_model(model, directory / "merged")
    return model, adapters


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(input_ids=torch.arange(1, 24)[None]).logits[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.foreign
@pytest.mark.parametrize("targets", [("attention", "feed_forward"), ("attention",)])
def test_peft_makes_the_merged_model_of_it(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the peft library is not installed")
    exported(MODELS[name], tmp_path, targets)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    merged = logits_of(load(tmp_path / "merged"))
    plain = load(tmp_path / "base")
    assert float((logits_of(plain) - merged).abs().max()) > 1e-2
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(adapted), merged, rtol=1e-4, atol=1e-4)


def test_factors_multiply_to_what_was_added(tmp_path: Path) -> None:
    model, adapters = exported(small_model, tmp_path, ("attention", "feed_forward"))
    assert isinstance(model, LanguageModel)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    scale = config["lora_alpha"] / config["r"]

    def factors(name: str) -> tuple[Tensor, Tensor]:
        at = f"base_model.model.model.layers.1.{name}"
        return tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"]

    for letter in "qkvo":
        a, b = factors(f"self_attn.{letter}_proj")
        name = f"model.layers.1.self_attn.{letter}_proj.weight"
        torch.testing.assert_close(base[name] + scale * b @ a, merged[name])
    a, b = factors("mlp.experts.base_layer")
    count = model.config.num_experts
    stacked = b.view(len(b), -1, count).permute(2, 0, 1) @ a.view(count, -1, a.shape[1])
    for expert in range(count):
        gate, up = (f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up"))
        before, after = (torch.cat((at[gate], at[up])) for at in (base, merged))
        torch.testing.assert_close(before + scale * stacked[expert], after)
    assert len(tensors) == 2 * 2 * (4 + 2) and sum(p.numel() for p in adapters.parameters()) > 0


def test_what_peft_would_misread_is_refused(tmp_path: Path) -> None:
    routed_and_dense = tiny_model("glm4_moe")
    with pytest.raises(CheckpointError, match="stacked experts"):
        save_peft(Adapters(routed_and_dense, AdapterConfig(rank=2)), routed_and_dense, tmp_path)
    model = small_model(**PLAIN_LATENT)
    adapters = Adapters(model, AdapterConfig(rank=2))
    with pytest.raises(CheckpointError, match="latent attention"):
        save_peft(adapters, model, tmp_path)
