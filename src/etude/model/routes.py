"""Expert routes: chosen by the router, recorded for training, replayed in training.

Layers are counted among those that route: a dense layer has no record. A dense model's routes have the shape
[T, 0, 0].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from etude.config import ModelConfig

RouteDtype = Literal["uint8", "uint16"]


def missing_route(dtype: torch.dtype) -> int:
    """The expert index that says that nothing was recorded: the largest of the type."""
    return torch.iinfo(dtype).max


class NativeRoutes:
    """Lets the router choose."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """scores [T, experts] -> the k best [T, top_k], best first."""
        return scores.topk(self._top_k, dim=-1).indices


class RecordedRoutes:
    """Lets the router choose and keeps what it chose."""

    def __init__(self, top_k: int, num_layers: int, dtype: RouteDtype = "uint8") -> None:
        """`num_layers`: those that route."""
        self._native = NativeRoutes(top_k)
        self._chosen: list[Tensor] = []
        self._num_layers = num_layers
        self._dtype = torch.uint8 if dtype == "uint8" else torch.uint16

    @staticmethod
    def of(config: ModelConfig) -> RecordedRoutes:
        """A recorder for models of this configuration."""
        return RecordedRoutes(config.routes_per_token, config.num_moe_layers, config.route_dtype)

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """See NativeRoutes.select."""
        chosen = self._native.select(layer, scores)
        self._chosen.append(chosen)
        return chosen

    def take(self, num_rows: int = 0) -> Tensor:
        """The routes of one forward pass, [T, layers, top_k]; forgets them. `num_rows`: T, which a dense
        model's record does not tell."""
        assert len(self._chosen) == self._num_layers, "one record per layer and forward pass"
        if not self._chosen:
            return torch.zeros((num_rows, 0, 0), dtype=self._dtype)
        routes = torch.stack(self._chosen, dim=1).to(self._dtype)
        self._chosen = []
        return routes


class ReplayedRoutes:
    """Returns the experts that were recorded in sampling; the router chooses where nothing was.

    The trainer's own gate weights are applied to the replayed experts, so gradients reach the router
    (rollout routing replay, R3: Ma et al. 2025).
    """

    def __init__(self, recorded: Tensor, wanted: Tensor | None = None) -> None:
        """recorded [T, layers, top_k] uint8 or uint16, `missing_route` where the router is to choose;
        `wanted` [N]: the rows that the last layer computes, where not all."""
        missing = missing_route(recorded.dtype)
        by_layer = [routes.long() for routes in recorded.unbind(1)]
        if wanted is not None and by_layer:
            by_layer[-1] = by_layer[-1].index_select(0, wanted)
        self._recorded = by_layer
        self._missing = [(routes == missing).any(dim=-1) for routes in by_layer]
        self._all_recorded = not any(bool(rows.any()) for rows in self._missing)

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """scores [T, experts] -> [T, top_k], in the recorded order."""
        recorded = self._recorded[layer]
        if self._all_recorded:
            return recorded
        native = scores.topk(recorded.shape[-1], dim=-1).indices
        return torch.where(self._missing[layer][:, None], native, recorded)
