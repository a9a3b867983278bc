"""Converts a dense Qwen3 or Llama checkpoint to a float32 GGUF file for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name for the tensor with this Hugging Face name."""
    whole = {"embed_tokens": "token_embd", "norm": "output_norm"}
    inner = name.removeprefix("model.").removesuffix(".weight")
    if inner in whole:
        return f"{whole[inner]}.weight"
    _, number, part = inner.split(".", 2)
    return f"blk.{number}.{_LAYER[part]}.weight"


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Writes the file. The head must be tied to the embedding; there is no tokenizer."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"], "written for tied heads"
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name != "lm_head.weight":
                tensor = _interleave(name, tensor, config) if config["model_type"] == "llama" else tensor
                writer.add_tensor(gguf_name(name), tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    """Permutes Llama's query and key rows: llama.cpp rotates adjacent rows, not the two halves of a head."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    halves = tensor.reshape(-1, 2, config["head_dim"] // 2, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
