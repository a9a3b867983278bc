"""Reads GGUF files (llama.cpp) as the Hugging Face directory that they were converted from.

    metadata ──> the values of a config.json
    tensors ──> float32 under Hugging Face's names, dequantised by the `gguf` package

The tokenizer is read by `etude.tokens.gguf_tokenizer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.errors import CheckpointError
from etude.errors.packages import missing_package
from etude.kit.git import lfs_fix
from etude.model.huggingface.fields import ForeignModelError

_MAGIC = b"GGUF"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""llama.cpp's names of tensors -> Hugging Face's."""
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The same within a layer."""
_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL_FIELDS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
_REFUSED_FIELDS = ("expert_count", "attention.sliding_window")
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of all Llama 3 models with scaling. GGUF stores only the divisors that result from it."""


def _check_magic(path: Path) -> None:
    """Raises CheckpointError for a file without GGUF's magic bytes."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            return
    fix = lfs_fix(path) or "name a GGUF file, or the model's Hugging Face directory"
    raise CheckpointError("is not a GGUF file", field=path.name, received=str(path), fix=fix)


class GgufFile:
    """One open file. Implements `Tensors` of `etude.model.huggingface.files`."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that is damaged, has unknown types or is one of several parts;
        MissingPackageError without the `gguf` package."""
        try:
            import gguf
        except ImportError as error:
            raise missing_package("reading GGUF files", "gguf") from error
        self._dequantize = gguf.dequantize
        _check_magic(path)
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: Mapping[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
        except Exception as error:  # anything that it raises for unexpected bytes
            raise CheckpointError(
                f"cannot be read as GGUF: {error}",
                field=path.name,
                received=str(path),
                fix="fetch it again, or update the gguf package if the file's format is newer",
            ) from error
        if self.metadata.get("split.count", 0) > 1:
            raise CheckpointError(
                "is one of several files",
                field=path.name,
                received=f"{self.metadata['split.count']} files",
                fix="join them with llama.cpp: llama-gguf-split --merge",
            )
        self._tensors = {_their_name(tensor.name): tensor for tensor in reader.tensors}
        self._frequencies = self._tensors.pop(_ROPE_FREQUENCIES, None)

    def config(self) -> dict[str, Any]:
        """The values of a `config.json`. Raises ForeignModelError, CheckpointError."""
        kind = self.metadata.get("general.architecture")
        if kind not in _ARCHITECTURES:
            raise ForeignModelError(
                "this architecture is not supported in GGUF files",
                field="general.architecture",
                received=kind,
                fix=f"use one of {', '.join(_ARCHITECTURES)}, or the model's Hugging Face directory",
            )
        for name in _REFUSED_FIELDS:
            if self.metadata.get(f"{kind}.{name}"):
                raise ForeignModelError(
                    "is not implemented",
                    field=f"{kind}.{name}",
                    received=self.metadata[f"{kind}.{name}"],
                    fix="use the model's Hugging Face directory",
                )
        values: dict[str, Any] = {"model_type": kind}
        for name, theirs in (_FIELDS | _OPTIONAL_FIELDS).items():
            found = self.metadata.get(f"{kind}.{theirs}")
            if found is not None:
                values[name] = _as_written(found)
            elif name in _FIELDS:
                raise CheckpointError("is missing", field=f"{kind}.{theirs}", fix="fetch the file again")
        if "model.embed_tokens.weight" in self._tensors:
            values["vocab_size"] = self.shape("model.embed_tokens.weight")[0]
        values["tie_word_embeddings"] = "lm_head.weight" not in self._tensors
        if scaling := self._rope_scaling(kind):
            values["rope_scaling"] = scaling
        return values

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._tensors[name].shape.tolist()))

    def read(self, name: str) -> Tensor:
        """See Tensors: float32. Raises CheckpointError for a type that the gguf package cannot read."""
        tensor = self._tensors[name]
        try:
            values = torch.from_numpy(self._dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            raise CheckpointError(
                "has a type that cannot be read",
                field=name,
                received=tensor.tensor_type.name,
                fix="use a file in another quantisation, such as Q8_0 or BF16",
            ) from error
        values = values.view(self.shape(name))
        if self.metadata["general.architecture"] == "llama" and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            return self._in_halves(name, values)
        return values

    def _in_halves(self, name: str, weight: Tensor) -> Tensor:
        """Reorders the rows of each head from llama.cpp's interleaved rotary layout to the half-split one."""
        count = "head_count" if "q_proj" in name else "head_count_kv"
        heads = self.metadata.get(f"llama.attention.{count}", self.metadata["llama.attention.head_count"])
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)

    def _rope_scaling(self, kind: str) -> dict[str, Any]:
        """The value of `rope_scaling` in a config.json; empty if positions are not scaled."""
        given = f"{kind}.rope.scaling"
        scaling = self.metadata.get(f"{given}.type", "none")
        if scaling != "none":
            names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
            found = {name: self.metadata.get(f"{given}.{theirs}") for name, theirs in names.items()}
            return {"rope_type": scaling} | {
                name: value for name, value in found.items() if value is not None
            }
        if self._frequencies is None:
            return {}
        divisors = torch.from_numpy(self._frequencies.data.copy()).view(-1)
        llama3 = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3}
        base = self.metadata.get(f"{kind}.rope.freq_base", 10_000.0)
        if not torch.allclose(divisors, _llama3_divisors(len(divisors), base, llama3), rtol=1e-3):
            raise ForeignModelError(
                "scales positions in a way that is not implemented",
                field=_ROPE_FREQUENCIES,
                received=[round(value, 3) for value in divisors.unique().tolist()],
                fix="use the model's Hugging Face directory",
            )
        return llama3


def _their_name(name: str) -> str:
    """Hugging Face's name of a tensor; unknown names are unchanged."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk.") and stem.count(".") == 2:
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}" if part in LAYER_NAMES else name
    return f"{TENSOR_NAMES[stem]}.{kind}" if stem in TENSOR_NAMES else name


def _as_written(value: Any) -> Any:
    """A float32 as the decimal number that it was converted from."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _llama3_divisors(count: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """By what each frequency is divided, [count] float32."""
    turns = (
        scaling["original_max_position_embeddings"] / (2 * math.pi) * base ** -(torch.arange(count) / count)
    )
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / (kept + (1 - kept) / scaling["factor"])
