"""The input rows of one forward pass over a packed batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from etude.protocols import Attention, Routes

if TYPE_CHECKING:
    from etude.model.feed_forward import RouterStatistics


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a packed batch, and which tokens are to be predicted from which of them."""

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
