"""Architectures that we do not implement: transformers' AutoModelForCausalLM behind our Model protocol.

They train with the same loss, batches and scoring as our own, and sample with vLLM. Experts are recorded and
replayed in their router modules. There is no batch-invariant mode; the importance ratio and the parity gate
account for the difference. transformers is imported only where it is used: that takes half as long as torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from etude.errors import CheckpointError, ConfigError
from etude.model.attention import PackedAttention
from etude.model.feed_forward import RouterStatistics
from etude.model.logprobs import checkpointed_logprobs
from etude.model.ops import Ops, TorchOps
from etude.model.routes import NativeRoutes, RecordedRoutes, ReplayedRoutes
from etude.model.transformers_routes import LayerLoads, find_routers, has_experts, routed_by
from etude.protocols import Attention, Routes

_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_STATE_FIELDS = ("state_size", "ssm_state_size", "mamba_d_state", "time_step_rank", "attention_hidden_size")
"""Fields by which configurations of state-space and recurrent models are recognised."""
MAX_GROUP_TOKENS = 8192
"""Maximum tokens of sequences that are computed together, including padding."""
_CIRCUMSTANCES = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a configuration that change when it is stored and read."""
_LEAST_SHARE = 0.7
"""A sequence shorter than this share of the group's longest begins another group."""


class TransformersModel(nn.Module):
    """One of transformers' causal language models, over packed sequences.

    Sequences of similar length are padded at their ends and computed as a batch: with causal attention no
    token attends to the padding. (transformers can also separate packed sequences by their positions, but not
    in every architecture.)
    """

    def __init__(self, inner: nn.Module) -> None:
        """`inner`: a causal language model of transformers; its parameters become this model's."""
        super().__init__()
        self.inner = inner
        self.ops: Ops = TorchOps()
        self.routers = find_routers(inner)
        """Router modules of a mixture of experts, by layer, as far as they are recognised."""

    @staticmethod
    def load(directory: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
        """Reads a Hugging Face directory. Raises CheckpointError; code in the directory is never run."""
        import transformers

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
        except Exception as error:  # anything that it raises for unexpected fields
            raise CheckpointError(
                f"transformers cannot load it: {error}", field="directory", received=str(directory)
            ) from error
        _check_supported(config)
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
        """A randomly initialised model of a transformers configuration. Raises CheckpointError as `load`."""
        import transformers

        _check_supported(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inner = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return TransformersModel(inner)

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields that determine the architecture: models with equal ones can load each other's weights."""
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

        Every layer computes all rows; in the last one that routes, `routes` and `statistics` are used for the
        rows `wanted` only, as in our own models; a dense model does not use them. Raises ConfigError for
        another attention than PackedAttention, and for routes or statistics of unrecognised routers.
        """
        asks_routers = routes is not None or statistics is not None
        if not isinstance(attention, PackedAttention) or (asks_routers and self.has_unknown_routers):
            raise ConfigError(
                "this model does not support packed batches, or its routers cannot be replayed",
                field="model",
                received=type(self.inner).__name__,
                fix="switch route replay and the balance loss off, and sample with engine.backend = 'vllm'",
            )
        asks_routers = asks_routers and bool(self.routers)
        places = None if wanted is None or not asks_routers else wanted.cpu()  # a single synchronisation
        body = _body_of(cast(Any, self.inner))
        loads = None if statistics is None else LayerLoads()
        parts: list[Tensor] = []
        start = 0
        for lengths in _groups(attention.lengths):
            rows = slice(start, start + sum(lengths))
            given = [values[rows].split(lengths) for values in (tokens, positions)]
            ids, at = (nn.utils.rnn.pad_sequence(list(parts), batch_first=True) for parts in given)
            with ExitStack() as stack:
                if asks_routers:
                    real = _real_rows(lengths, ids.device)
                    choose = _GroupChoice(routes, self.routers, real, start, places)
                    stack.enter_context(routed_by(self.routers, choose, loads, real))
                output = body(input_ids=ids, position_ids=at, use_cache=False).last_hidden_state
            parts += [row[:length] for row, length in zip(output, lengths, strict=True)]
            start = rows.stop
        if statistics is not None and loads is not None:
            loads.append_to(statistics)
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    @property
    def has_unknown_routers(self) -> bool:
        """Whether experts are chosen by unrecognised routers, which can be neither replayed nor measured."""
        return not self.routers and has_experts(self.inner)

    @property
    def routes_shape(self) -> tuple[int, int]:
        """Layers that route, and experts per token; (0, 0) for a dense model."""
        return (len(self.routers), int(cast(Any, self.routers[0]).top_k)) if self.routers else (0, 0)

    @property
    def num_experts(self) -> int:
        """Experts of a layer that routes; 0 for a dense model."""
        return int(cast(Any, self.routers[0]).num_experts) if self.routers else 0

    def recorder(self) -> RecordedRoutes:
        """Records the experts of one forward pass."""
        num_layers, top_k = self.routes_shape
        return RecordedRoutes(top_k, num_layers, "uint8" if self.num_experts <= 255 else "uint16")

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


class _GroupChoice:
    """Chooses experts for one padded group out of a packed batch."""

    def __init__(
        self,
        routes: Routes[Tensor] | None,
        routers: list[nn.Module],
        real: Tensor,
        start: int,
        wanted: Tensor | None,
    ) -> None:
        """`real`: the group's rows that are no padding; the first is row `start` of the batch. `wanted`: rows
        of the batch that are selected in the last layer, on the CPU."""
        assert routes is None or isinstance(routes, (NativeRoutes, RecordedRoutes, ReplayedRoutes))
        self._routes = routes
        self._routers = routers
        self._of_all = real, torch.arange(start, start + len(real), device=real.device)
        """Indices of the rows in the group, and in the batch, which the routes use."""
        self._of_last = self._of_all
        if wanted is not None:
            rows = ((wanted >= start) & (wanted < start + len(real))).nonzero().flatten()
            inside = (wanted[rows] - start).to(real.device)
            self._of_last = real[inside], rows.to(real.device)

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        native = scores.topk(int(cast(Any, self._routers[layer]).top_k), dim=-1).indices
        if self._routes is None or isinstance(self._routes, NativeRoutes):
            return native
        real, rows = self._of_last if layer == len(self._routers) - 1 else self._of_all
        return native.index_copy(0, real, self._routes.select(layer, scores[real], rows))


def _body_of(inner: Any) -> Any:
    """The model without its output head; Llama 4's text model wrongly names itself as that."""
    return inner.model if inner.base_model is inner else inner.base_model


def _real_rows(lengths: list[int], device: torch.device) -> Tensor:
    """The rows that are tokens, of sequences padded to the first's length and flattened."""
    width = lengths[0]
    return torch.cat([torch.arange(i * width, i * width + n, device=device) for i, n in enumerate(lengths)])


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disables transformers' progress bars for loading and saving, and restores the setting."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _groups(lengths: tuple[int, ...]) -> list[list[int]]:
    """Groups falling sequence lengths into those that are computed at once."""
    groups: list[list[int]] = []
    for length in lengths:
        last = groups[-1] if groups else None
        if last and last[0] * (len(last) + 1) <= MAX_GROUP_TOKENS and length >= last[0] * _LEAST_SHARE:
            last.append(length)
        else:
            groups.append([length])
    return groups


def _check_supported(config: Any) -> None:
    """Raises CheckpointError for models that are not decoders with attention only: a recurrent state would
    continue through padding, and an encoder would have no input."""
    text = config.get_text_config()
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    recurrent = sorted(kinds - _ATTENTION_KINDS) or [n for n in _STATE_FIELDS if getattr(text, n, None)]
    if config.is_encoder_decoder or recurrent:
        raise CheckpointError(
            "is an encoder-decoder model" if config.is_encoder_decoder else "has recurrent layers",
            field="config.json: model_type",
            received=f"{config.model_type}: {', '.join(recurrent)}" if recurrent else config.model_type,
            fix="use a causal language model whose layers are all attention",
        )


def _check_report(report: Mapping[str, Any]) -> None:
    """Raises CheckpointError for tensors that transformers initialised at random, or ignored."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            raise CheckpointError(
                f"{len(names)} {kind.replace('_', ' ')}",
                field="tensors",
                received=names[:4],
                fix="fetch the checkpoint again, or its config.json: the two do not match",
            )
