"""Architectures that are not defined here: transformers' AutoModelForCausalLM behind our Model protocol.

They train with the same loss, batches and scoring as our own, and sample through vLLM. What they lack: routes
are neither recorded nor replayed, and there is no batch-invariant mode; the importance ratio and the parity
gate carry the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging

from etude.errors import CheckpointError, ConfigError
from etude.model.attention import PackedAttention
from etude.model.feed_forward import RouterStatistics
from etude.model.logprobs import checkpointed_logprobs
from etude.model.ops import Ops, TorchOps
from etude.protocols import Attention, Routes

MAX_GROUP_TOKENS = 8192
"""Sequences are computed together up to so many tokens, padding included."""
_CIRCUMSTANCES = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a configuration that change when it is stored and read."""
_LEAST_SHARE = 0.7
"""A sequence shorter than this share of the group's longest begins another group."""


class TransformersModel(nn.Module):
    """One of transformers' causal language models, over packed sequences.

    Sequences of like length are padded at their ends and computed side by side: behind causal attention no
    token sees the padding. (transformers can also tell packed sequences apart by their positions, but not in
    every architecture.)
    """

    def __init__(self, inner: nn.Module) -> None:
        """`inner`: a causal language model of transformers; its parameters become this model's."""
        super().__init__()
        self.inner = inner
        self.ops: Ops = TorchOps()

    @staticmethod
    def load(directory: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
        """Reads a Hugging Face directory. Raises CheckpointError; code in the directory is never run."""
        try:
            with _no_progress_bars():
                config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
                inner, report = cast(Any, transformers.AutoModelForCausalLM).from_pretrained(
                    directory,
                    config=config,
                    dtype=dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"transformers cannot load it: {error}", field="directory", received=str(directory)
            ) from error
        _check_report(cast(Mapping[str, Any], report))
        model = TransformersModel(inner)
        for name, parameter in model.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise CheckpointError(
                    "has values that are not finite", field=name, fix="use an earlier checkpoint"
                )
        return model

    @staticmethod
    def from_config(config: Any, seed: int) -> TransformersModel:
        """A model of a transformers configuration with new weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inner = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return TransformersModel(inner)

    @property
    def config(self) -> Mapping[str, Any]:
        """What decides the architecture: models with equal ones can hold each other's weights."""
        values = cast(Any, self.inner).config.to_dict()
        return {name: value for name, value in values.items() if name not in _CIRCUMSTANCES}

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(cast(Any, self.inner).config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Longest sequence in tokens."""
        return int(cast(Any, self.inner).config.max_position_embeddings)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention[Tensor],
        routes: Routes[Tensor] | None = None,
        statistics: RouterStatistics | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """tokens [T], positions [T] -> final hidden states [T, width], or the rows `wanted` [N] of them.

        Raises ConfigError for what needs an architecture of our own: another attention than PackedAttention,
        routes, router statistics.
        """
        if not isinstance(attention, PackedAttention) or routes is not None or statistics is not None:
            raise ConfigError(
                "transformers' models are computed in packed batches, without routes and router statistics",
                field="model",
                received=type(self.inner).__name__,
                fix="switch route replay and the balance loss off, and sample with engine.backend = 'vllm'",
            )
        body = cast(Any, self.inner).base_model
        parts: list[Tensor] = []
        start = 0
        for lengths in _groups(attention.lengths):
            rows = slice(start, start + sum(lengths))
            given = [values[rows].split(lengths) for values in (tokens, positions)]
            ids, places = (nn.utils.rnn.pad_sequence(list(parts), batch_first=True) for parts in given)
            output = body(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
            parts += [row[:length] for row, length in zip(output, lengths, strict=True)]
            start = rows.stop
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, width] -> logits [N, vocabulary] in float32."""
        return cast(Any, self.inner).get_output_embeddings()(hidden).float()

    def logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """hidden [N, width], tokens [N] -> float32 log-probability of each and entropy (detached) [N]."""
        return checkpointed_logprobs(
            self.logits, self.ops.log_softmax, hidden, tokens, temperature, self.vocab_size
        )

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face directory that transformers, vLLM and `load` read."""
        with _no_progress_bars():
            cast(Any, self.inner).save_pretrained(directory, safe_serialization=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws one for each load and save; its switch is put back."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _groups(lengths: tuple[int, ...]) -> list[list[int]]:
    """Lengths, which fall, of the sequences of each group that is computed at once."""
    groups: list[list[int]] = []
    for length in lengths:
        last = groups[-1] if groups else None
        if last and last[0] * (len(last) + 1) <= MAX_GROUP_TOKENS and length >= last[0] * _LEAST_SHARE:
            last.append(length)
        else:
            groups.append([length])
    return groups


def _check_report(report: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what transformers fills with fresh random values, or leaves out."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            raise CheckpointError(
                f"{len(names)} {kind.replace('_', ' ')}",
                field="tensors",
                received=names[:4],
                fix="fetch the checkpoint again, or its config.json: the two do not belong together",
            )
