"""What one forward pass over a packed batch computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from etude.protocols import Attention, Routes

if TYPE_CHECKING:
    from etude.model.feed_forward import RouterStatistics


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a packed batch, and which of them are to predict what."""

    tokens: Tensor
    """[T]"""
    positions: Tensor
    """[T] within their sequences."""
    attention: Attention[Tensor]
    wanted: Tensor
    """[N] rows from which a token is predicted."""
    following: Tensor
    """[N] the tokens that follow them."""
    routes: Routes[Tensor] | None
    statistics: RouterStatistics | None
