"""Expert routes: chosen by the router, recorded for training, replayed in training.

Layer indices count only layers that route; dense layers have no routes. A dense model's routes have the shape
[T, 0, 0].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import RouteReplayError

RouteDtype = Literal["uint8", "uint16"]


def missing_route(dtype: torch.dtype) -> int:
    """The expert index that marks a route that was not recorded: the largest of the type."""
    return torch.iinfo(dtype).max


class NativeRoutes:
    """Lets the router choose."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """scores [T, experts] -> the k best [T, top_k], best first."""
        return scores.topk(self._top_k, dim=-1).indices


class RecordedRoutes:
    """Lets the router choose, and records its choice."""

    def __init__(self, top_k: int, num_layers: int, dtype: RouteDtype = "uint8") -> None:
        """`num_layers`: number of layers that route."""
        self._native = NativeRoutes(top_k)
        self._chosen: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._num_layers = num_layers
        self._dtype = torch.uint8 if dtype == "uint8" else torch.uint16

    @staticmethod
    def of(config: ModelConfig) -> RecordedRoutes:
        """A recorder for models of this configuration."""
        return RecordedRoutes(config.routes_per_token, config.num_moe_layers, config.route_dtype)

    def select(self, layer: int, scores: Tensor, rows: Tensor | None = None) -> Tensor:
        """See NativeRoutes.select. `rows`: the next ones in order, if several calls select a layer's rows."""
        chosen = self._native.select(layer, scores)
        assert rows is not None or not self._chosen[layer], "one record per layer and forward pass"
        self._chosen[layer].append(chosen)
        return chosen

    def pop_routes(self, num_rows: int = 0, wanted: Tensor | None = None) -> Tensor:
        """Returns the routes of one forward pass, [T, layers, top_k], and clears the record.

        `num_rows`: T, which a dense model's record lacks. `wanted` [N]: the rows that the last layer
        computed, if not all; the others are `missing_route` there.
        """
        assert all(self._chosen), "one record per layer and forward pass"
        if not self._chosen:
            return torch.zeros((num_rows, 0, 0), dtype=self._dtype)
        layers = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._chosen]
        if wanted is not None:
            computed = layers[-1]
            rows = computed.new_full((num_rows, computed.shape[1]), missing_route(self._dtype))
            layers[-1] = rows.index_copy(0, wanted, computed)
        self._chosen = [[] for _ in range(self._num_layers)]
        return torch.stack(layers, dim=1).to(self._dtype)


class ReplayedRoutes:
    """Returns the recorded experts; where none were recorded, the router chooses.

    The trainer's own gate weights are applied to the replayed experts, so gradients reach the router. With
    routes recorded by the engine during sampling this is R3 (Ma et al. 2025); with those of the trainer at
    the step's start, R2 (Zheng et al. 2025).
    """

    def __init__(self, recorded: Tensor, wanted: Tensor | None = None, min_share: float = 0.0) -> None:
        """recorded [T, layers, top_k] uint8 or uint16, `missing_route` where the router is to choose;
        `wanted` [N]: the rows that the last layer computes, if not all.

        `min_share`: a replayed expert whose score is below this share of the router's own k-th best (if that
        is positive) is replaced by the router's best that is not replayed. 0 replays all recorded experts.
        """
        by_layer = [routes.long() for routes in recorded.unbind(1)]
        if wanted is not None and by_layer:
            by_layer[-1] = by_layer[-1].index_select(0, wanted)
        self._recorded = by_layer
        missing = missing_route(recorded.dtype)
        self._missing = [(routes == missing).any(dim=-1) for routes in by_layer]
        # Skips the router's own choice if it is not needed. On a GPU, finding that out would need a
        # synchronisation, which costs more than the choice.
        on_cpu = recorded.device.type == "cpu"
        self._all_recorded = on_cpu and not any(bool(rows.any()) for rows in self._missing)
        self._min_share = min_share
        self._uses = [0] * len(by_layer)
        """Rows that were replayed, by layer."""

    def select(self, layer: int, scores: Tensor, rows: Tensor | None = None) -> Tensor:
        """scores [T, experts] -> [T, top_k], in the recorded order; `rows` [n]: of these alone, [n, experts]
        -> [n, top_k]."""
        chosen, missing = self._recorded[layer], self._missing[layer]
        if rows is not None:
            chosen, missing = chosen[rows], missing[rows]
        self._uses[layer] += len(chosen)
        if not self._all_recorded:
            native = scores.topk(chosen.shape[-1], dim=-1).indices
            chosen = torch.where(missing[:, None], native, chosen)
        return _plausible(chosen, scores, self._min_share) if self._min_share > 0 else chosen

    def check_consumed(self) -> None:
        """To be called after the forward pass, before its backward pass, which may recompute layers.

        Raises RouteReplayError unless every row of every layer's record was used exactly once.
        """
        pairs = list(zip(self._uses, self._recorded, strict=True))
        if any(uses != len(record) for uses, record in pairs):
            raise RouteReplayError(
                "each layer's routes must be replayed exactly once per forward pass",
                field="routes",
                received=[uses / max(1, len(record)) for uses, record in pairs],
                fix="give each forward pass its own ReplayedRoutes",
            )


def _plausible(chosen: Tensor, scores: Tensor, min_share: float) -> Tensor:
    """chosen [T, top_k] with implausible experts replaced in place; scores [T, experts]."""
    top_k = chosen.shape[-1]
    last = scores.topk(top_k, dim=-1).values[:, -1:]
    bound = torch.where(last > 0, min_share * last, float("-inf"))
    implausible = scores.gather(1, chosen) < bound
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, ~implausible)
    best = scores.masked_fill(kept, float("-inf")).topk(top_k, dim=-1).indices
    place = (implausible.cumsum(dim=1) - 1).clamp(min=0)
    return torch.where(implausible, best.gather(1, place), chosen)
