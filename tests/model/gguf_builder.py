"""GGUF files of transformers' small models, written as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.model.gguf_file import LAYER_NAMES, TENSOR_NAMES
from etude.tokens import Tokenizer, train_tokenizer

END, START = "<|im_end|>", "<|im_start|>"
_LAYERS = {theirs: name for name, theirs in LAYER_NAMES.items()}
_WHOLE = {theirs: name for name, theirs in TENSOR_NAMES.items()}
_TYPES = {"normal": 1, "control": 3}


def gguf_package() -> Any:
    return pytest.importorskip("gguf", reason="the gguf package is not installed")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor that Hugging Face names so."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYERS[part]}.{kind}"


def _in_pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """As llama.cpp's converter lays out queries and keys of Llama."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Tokenizer | None = None,
    cut: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, NDArray[np.float32]]], object] = lambda _: None,
    quantisation: str = "F32",
) -> None:
    """`tensors` may change what is written, under llama.cpp's names; matrices are quantised as named."""
    gguf = gguf_package()
    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    values: dict[str, Any] = {
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    for name, value in (values | dict(metadata or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name, value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, cut)
    written = {gguf_name(name): tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del written["output.weight"]
    for name in written if kind == "llama" else ():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = config.num_attention_heads if "_q" in name else config.num_key_value_heads
            written[name] = _in_pairs(written[name], heads)
    tensors(written)
    for name, array in written.items():
        if array.ndim == 2 and quantisation != "F32":
            chosen = gguf.GGMLQuantizationType[quantisation]
            writer.add_tensor(name, gguf.quantize(array, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_tokenizer() -> Tokenizer:
    """At most 320 tokens, two of them control tokens."""
    texts = ["def add(left, right):\n    return left + right\n", "what it's worth: 12 of  345"] * 3
    return train_tokenizer(texts, 320, (START, END))


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, cut: str) -> None:
    import json

    definition = json.loads(tokenizer._definition)
    vocabulary = definition["model"]["vocab"] | {
        token["content"]: token["id"] for token in definition["added_tokens"]
    }
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    control = set(tokenizer.control_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(names)
    writer.add_token_types([_TYPES["control" if name in control else "normal"] for name in names])
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in definition["model"]["merges"]]
    )
    writer.add_eos_token_id(tokenizer.control_id(END))
    writer.add_chat_template("{{ messages }}")
