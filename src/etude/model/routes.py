"""Expert routes: chosen by the router, recorded for training, replayed in training."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.records import NATIVE_ROUTE


class NativeRoutes:
    """Lets the router choose."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """scores [T, experts] -> the k best [T, top_k], best first."""
        return scores.topk(self._top_k, dim=-1).indices


class RecordedRoutes:
    """Lets the router choose and keeps what it chose."""

    def __init__(self, top_k: int, num_layers: int) -> None:
        self._native = NativeRoutes(top_k)
        self._chosen: list[Tensor] = []
        self._num_layers = num_layers

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """See NativeRoutes.select."""
        chosen = self._native.select(layer, scores)
        self._chosen.append(chosen)
        return chosen

    def take(self) -> Tensor:
        """The routes of one forward pass, [T, layers, top_k] uint8; forgets them."""
        assert len(self._chosen) == self._num_layers, "one record per layer and forward pass"
        routes = torch.stack(self._chosen, dim=1).to(torch.uint8)
        self._chosen = []
        return routes


class ReplayedRoutes:
    """Returns the experts that were recorded in sampling; the router chooses where nothing was.

    The trainer's own gate weights are applied to the replayed experts, so gradients reach the router
    (rollout routing replay, R3: Ma et al. 2025).
    """

    def __init__(self, recorded: Tensor, wanted: Tensor | None = None) -> None:
        """recorded [T, layers, top_k] uint8, NATIVE_ROUTE where the router is to choose; `wanted` [N]: the
        rows that the last layer computes, where not all."""
        by_layer = list(recorded.unbind(1))
        if wanted is not None:
            by_layer[-1] = by_layer[-1].index_select(0, wanted)
        self._recorded = [routes.long() for routes in by_layer]
        self._missing = [(routes == NATIVE_ROUTE).any(dim=-1) for routes in by_layer]
        self._all_recorded = not any(bool(missing.any()) for missing in self._missing)

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """scores [T, experts] -> [T, top_k], in the recorded order."""
        recorded = self._recorded[layer]
        if self._all_recorded:
            return recorded
        native = scores.topk(recorded.shape[-1], dim=-1).indices
        return torch.where(self._missing[layer][:, None], native, recorded)
