"""The model's weights in the layout of the native forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from etude.config import ModelConfig
from etude.inference.cache import PagedCache
from etude.inference.native.structures import Entrance, Factors, Layer, Model
from etude.model import Block, DenseMlp, DraftLayers, Experts, GroupedQueryBlock, LanguageModel
from etude.model.adapted_ops import Pair
from etude.model.blocks import LATENT_NORM_EPS, LatentBlock
from etude.model.drafting import DraftLayer
from etude.model.feed_forward import SharedExperts
from etude.model.kernels.native.matrices import (
    NativeMatrix,
    PackedMatrices,
    StreamedMemory,
    WeightType,
    address,
    pack,
)

_KINDS = (
    *("qkv", "compress", "query_up", "out", "key_up", "value_up"),
    *("gate_up", "down", "shared_gate_up", "shared_down"),
)
"""Weights that adapters can apply to, in the order of forward.h."""


class _NativeBlocks:
    """Copies of blocks' weights, packed for the matrix products, and the structures that point to them and to
    the pages of a cache."""

    @torch.no_grad()
    def __init__(
        self,
        config: ModelConfig,
        blocks: Iterable[nn.Module],
        model: LanguageModel,
        cache: PagedCache,
        weight_type: WeightType,
    ) -> None:
        """`config`: of the `blocks`; `model`: whose embedding and rotary tables they use."""
        self._type: WeightType = weight_type
        self._cache = cache
        self._held: list[Tensor | PackedMatrices] = []
        self._memory = StreamedMemory()
        self._top_k = config.experts_per_token
        self.work_per_row = 0
        """Multiplications for one row, without the output head."""
        blocks = [cast(Block, block) for block in blocks]
        self.model = self._describe(config, blocks[0], model)
        self.layers = (Layer * config.num_layers)()
        for index, block in enumerate(blocks):
            self.layers[index] = self._layer(block)
        self.point_at_pages()

    def point_at_pages(self) -> None:
        """Sets every layer's pointers to the current memory of the cache."""
        for index, layer in enumerate(self.layers):
            layer.keys = self._cache.keys[index].data_ptr()
            if self._cache.values is not None:
                layer.values = self._cache.values[index].data_ptr()

    def _describe(self, config: ModelConfig, first: Block, model: LanguageModel) -> Model:
        described = Model(
            width=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.cache_heads,
            dim=config.key_dim,
            value_dim=config.value_dim,
            layers=config.num_layers,
            experts=config.num_experts if config.num_moe_layers else 0,
            top_k=config.experts_per_token,
            expert_size=config.expert_size if config.num_moe_layers else 0,
            inner=0 if config.num_moe_layers == config.num_layers else config.intermediate_size,
            normalise=config.norm_topk_prob,
            eps=config.rms_norm_eps,
            gate_scale=1.0,
            embedding=self._keep(model.embedding),
            cosine=self._keep(cast(Tensor, model.cosine)),
            signed_sine=self._keep(cast(Tensor, model.signed_sine)),
            final_norm=self._keep(model.final_norm),
        )
        if config.is_latent:
            described.latent = described.sigmoid = 1
            described.query_rank = config.q_lora_rank
            described.nope, described.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
            described.head_value_dim = config.v_head_dim
            described.latent_eps = LATENT_NORM_EPS
            described.query_scale = cast(LatentBlock, first).scale
            described.gate_scale = config.routed_scaling_factor
            described.groups, described.top_groups = config.n_group, config.topk_group
            described.shared_inner = config.n_shared_experts * described.expert_size
        return described

    def _layer(self, block: Block) -> Layer:
        layer = Layer(
            attention_norm=self._keep(block.attention_norm),
            experts_norm=self._keep(block.experts_norm),
            out=self._single(block.out),
            route_layer=max(-1, block.route_layer),
        )
        if isinstance(block, LatentBlock):
            self._add_latent(layer, block)
        else:
            self._add_grouped(layer, cast(GroupedQueryBlock, block))
        if block.experts is None:
            mlp = cast(DenseMlp, block.mlp)
            layer.gate_up, layer.down = self._several([mlp.gate_up.t()]), self._several([mlp.down.t()])
        else:
            self._add_experts(layer, block.experts)
        return layer

    def _add_grouped(self, layer: Layer, block: GroupedQueryBlock) -> None:
        if block.query_norm is not None and block.key_norm is not None:
            layer.query_norm, layer.key_norm = self._keep(block.query_norm), self._keep(block.key_norm)
        if block.qkv_bias is not None:
            layer.qkv_bias = self._keep(block.qkv_bias)
        layer.qkv = self._single(block.qkv)

    def _add_latent(self, layer: Layer, block: LatentBlock) -> None:
        layer.key_norm = self._keep(block.compress_norm)
        queries = block.query_up
        if block.has_query_rank:
            layer.query_norm = self._keep(block.query_norm)
            layer.query_up = self._single(block.query_up)
            queries = block.query_down
        layer.qkv = self._single(torch.cat((queries, block.compress)))
        layer.key_up = self._several(block.key_up.unbind(0))
        layer.value_up = self._several(block.value_up.transpose(1, 2).unbind(0))

    def _add_experts(self, layer: Layer, experts: Experts) -> None:
        layer.router = self._single(experts.router, "float32")  # as the module has it
        layer.gate_up = self._several(experts.gate_up.unbind(0), self._top_k)
        layer.down = self._several(experts.down.unbind(0), self._top_k)
        if isinstance(experts, SharedExperts):
            layer.score_bias = self._keep(experts.score_bias)
            if experts.shared is not None:
                layer.shared_gate_up = self._several([experts.shared.gate_up.t()])
                layer.shared_down = self._several([experts.shared.down.t()])

    def _single(self, weight: Tensor, weight_type: WeightType | None = None) -> NativeMatrix:
        """weight [outputs, inputs], packed."""
        packed = self._pack([weight.t()], weight_type)
        self.work_per_row += weight.numel()
        return packed.native[0]

    def _several(self, weights: Sequence[Tensor], per_row: int | None = None) -> int:
        """Address of packed matrices [inputs, outputs], of which each row uses `per_row` (default: all)."""
        self.work_per_row += weights[0].numel() * (len(weights) if per_row is None else per_row)
        return address(self._pack(weights).native)

    def _pack(self, weights: Sequence[Tensor], weight_type: WeightType | None = None) -> PackedMatrices:
        packed = pack(weights, weight_type or self._type, self._memory.allocate)
        self._held.append(packed)
        return packed

    def _keep(self, tensor: Tensor) -> int:
        """Address of the tensor's contiguous float32 values, which are kept alive."""
        kept = tensor.detach().float().contiguous()
        self._held.append(kept)
        return kept.data_ptr()


class NativeWeights(_NativeBlocks):
    """A model's weights."""

    @torch.no_grad()
    def __init__(self, model: LanguageModel, cache: PagedCache, weight_type: WeightType) -> None:
        super().__init__(model.config, model.blocks, model, cache, weight_type)
        self.head = self._pack([model.head.t()])
        """The output head."""

    def use_adapters(self, adapters: Sequence[NativeAdapter]) -> None:
        """Sets the adapters that rows refer to by slot, from the next pass on."""
        self._adapters: list[object] = [*adapters]
        self.model.adapter_rank = max((adapter.rank for adapter in adapters), default=0)
        for index, layer in enumerate(self.layers):
            tables = (Factors * len(_KINDS))()
            for kind, table in zip(_KINDS, tables, strict=True):
                self._fill(table, [adapter.weights.get((index, kind)) for adapter in adapters], index, kind)
            self._adapters.append(tables)
            layer.factors = address(tables) if adapters else None

    def _fill(self, table: Factors, factors: Sequence[_Packed | None], index: int, kind: str) -> None:
        """The factors of one weight or stack, adapter by adapter."""
        count = self._num_weights(index, kind)
        down, up = (NativeMatrix * (count * len(factors)))(), (NativeMatrix * (count * len(factors)))()
        for place, packed in enumerate(factors):
            for side, target in enumerate((down, up)):
                if packed is not None:
                    target[place * count : (place + 1) * count] = list(packed[side].native)
        table.count, table.down, table.up = count, address(down), address(up)
        self._adapters += [down, up]

    def _num_weights(self, index: int, kind: str) -> int:
        if kind in ("key_up", "value_up"):
            return self.model.heads
        routed = self.layers[index].route_layer >= 0 and kind in ("gate_up", "down")
        return self.model.experts if routed else 1


_Packed = tuple[PackedMatrices, PackedMatrices]
"""The first and the second factor that a row is multiplied by."""


class NativeAdapter:
    """One adapter's factors, packed for the matrix products."""

    @torch.no_grad()
    def __init__(self, model: LanguageModel, pairs: Mapping[str, Pair]) -> None:
        """`pairs`: by the names of the weights of `model`."""
        self.rank = max(right.shape[-2] for _, right in pairs.values())
        self.weights: dict[tuple[int, str], _Packed] = {}
        """Packed factors, by layer and kind of weight."""
        for name, (left, right) in pairs.items():
            layer, place = name.removeprefix("blocks.").split(".", 1)
            block, last = cast(Block, model.blocks[int(layer)]), place.rpartition(".")[2]
            if last == "query_down" or (last == "query_up" and not cast(LatentBlock, block).has_query_rank):
                last = "qkv"
            kind = f"shared_{last}" if "shared" in place else last
            # A row x becomes x left right in stacks [experts or heads, in, out], else x right^T left^T.
            first, second = (left, right) if left.ndim == 3 and kind != "value_up" else (right.mT, left.mT)
            stacks = [factor if factor.ndim == 3 else factor[None] for factor in (first, second)]
            self.weights[int(layer), kind] = (pack(stacks[0].unbind(0)), pack(stacks[1].unbind(0)))


class NativeDraftWeights(_NativeBlocks):
    """The weights of a model's draft layers, over their own cache."""

    @torch.no_grad()
    def __init__(
        self, drafts: DraftLayers, model: LanguageModel, cache: PagedCache, weight_type: WeightType
    ) -> None:
        layers = [cast(DraftLayer, layer) for layer in drafts.layers]
        super().__init__(drafts.config, [layer.block for layer in layers], model, cache, weight_type)
        self.model.drafting = 1
        self.entrances = (Entrance * len(layers))()
        for index, layer in enumerate(layers):
            self.entrances[index] = Entrance(
                token_norm=self._keep(layer.embedding_norm),
                hidden_norm=self._keep(layer.hidden_norm),
                final_norm=self._keep(layer.final_norm),
                projection=self._single(layer.projection),
            )
