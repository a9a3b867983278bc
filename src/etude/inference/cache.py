"""The paged KV cache: keys, values and routes in pages of 16 tokens, and the rows that a step computes.

Positions 16 i .. 16 i + 15 of a session lie in the i-th page of its page table. Pages are shared between
sessions with a common prefix; `radix.py` and `pages.py` keep track of ownership.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import ConfigError
from etude.model.kernels.native.matrices import StreamedMemory

PAGE_TOKENS = 16
"""Positions in a page."""
CacheFormat = Literal["float32", "bfloat16"]
"""Number formats of keys and values."""


def pages_for(num_tokens: int) -> int | None:
    """Pages needed for `num_tokens`; None for 0, which leaves the choice to the engine."""
    return -(-num_tokens // PAGE_TOKENS) or None


def count_pages(config: ModelConfig, num_sessions: int, max_tokens: int, asked: int | None) -> int:
    """Pages of the cache: those asked for, or enough for all sessions. Raises ConfigError: see Engine."""
    if max_tokens > config.max_positions + 1:  # the last token of a session is never computed
        raise ConfigError(
            f"the model has {config.max_positions} positions",
            field="max_tokens",
            received=max_tokens,
            fix=f"give at most {config.max_positions + 1}",
        )
    pages_of_one = -(-max_tokens // PAGE_TOKENS)
    num_pages = num_sessions * pages_of_one if asked is None else asked
    if num_pages < pages_of_one:
        raise ConfigError(
            "too few pages for one session",
            field="num_pages",
            received=num_pages,
            fix=f"give at least {pages_of_one}, or lower the longest session of {max_tokens} tokens",
        )
    return num_pages


def cache_type(wanted: str, kernels: str, computed: CacheFormat) -> CacheFormat:
    """Number format of keys and values; `wanted` may be `auto`: as the model computes. Raises ConfigError
    for one that the kernels cannot read."""
    held: CacheFormat = computed if wanted == "auto" else "bfloat16" if wanted == "bfloat16" else "float32"
    if kernels == "native" and held != "float32":
        raise ConfigError(
            "native kernels hold keys and values in float32",
            field="engine.cache_dtype",
            received=wanted,
            fix="leave it at auto, or set engine.kernels=eager",
        )
    return held


def page_bytes(config: ModelConfig, dtype: CacheFormat = "float32") -> int:
    """Bytes of one page's keys, values and routes."""
    width = config.key_dim + (0 if config.value_is_key_prefix else config.value_dim)
    routes = config.num_moe_layers * config.routes_per_token * np.dtype(config.route_dtype).itemsize
    element_bytes = 2 if dtype == "bfloat16" else 4
    return PAGE_TOKENS * (element_bytes * config.num_layers * config.cache_heads * width + routes)


class PagedCache:
    """The storage: keys, values and routes of every position of every page."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """On a CPU, memory is only committed for pages that are written. Routes always lie in CPU memory."""
        self._config = config
        self._device, self._dtype = device or torch.device("cpu"), dtype
        self.num_pages = num_pages
        self.drafts: PagedCache | None = None
        """Keys and values of the draft layers, in pages of the same numbers."""
        self.value_dim = config.value_dim
        self.keys: Tensor
        """[layers, pages, cache_heads, key_dim, 16]: transposed, so that 16 scores are one vector."""
        self.values: Tensor | None = None
        """[layers, pages, cache_heads, 16, value_dim]; None where values are the first part of the keys."""
        self._resize(num_pages)
        route_shape = (num_pages, PAGE_TOKENS, config.num_moe_layers, config.routes_per_token)
        self.routes: NDArray[Any] = np.zeros(route_shape, dtype=config.route_dtype)
        """[pages, 16, MoE layers, top_k]: of the pass that computed the position's keys."""

    @property
    def is_allocated(self) -> bool:
        """Whether keys and values have memory: not after `release`."""
        return self.keys.shape[1] == self.num_pages

    def release(self) -> None:
        """Frees the memory of keys and values; pointers into it must be updated."""
        self._resize(0)
        if self.drafts is not None:
            self.drafts.release()

    def allocate(self) -> None:
        """Allocates memory for all pages again, at other addresses: all pages are empty."""
        self._resize(self.num_pages)
        if self.drafts is not None:
            self.drafts.allocate()

    def _resize(self, num_pages: int) -> None:
        config = self._config
        shape = (config.num_layers, num_pages, config.cache_heads)
        key_shape = (*shape, config.key_dim, PAGE_TOKENS)
        self.keys = self._zeros(key_shape)
        if not config.value_is_key_prefix:
            value_shape = (*shape, PAGE_TOKENS, config.value_dim)
            self.values = self._zeros(value_shape)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type == "cpu":
            return StreamedMemory().allocate(shape, self._dtype)
        return torch.zeros(shape, device=self._device, dtype=self._dtype)

    def copy_page(self, source: int, target: int) -> None:
        """Copies everything that page `source` holds over page `target`."""
        for store in (self.keys, self.values):
            if store is not None:
                store[:, target] = store[:, source]
        self.routes[target] = self.routes[source]
        if self.drafts is not None:
            self.drafts.copy_page(source, target)


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Input of a forward pass: T rows, each one position of one of S sequences.

    Rows of one sequence are consecutive, their positions ascending. All arrays are C-contiguous.
    """

    tokens: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T]"""
    sequence: NDArray[np.int64]
    """[T] row of `tables`."""
    tables: NDArray[np.int32]
    """[S, most pages of any] page of each 16 positions; entries past a sequence's last page are unused,
    but valid page numbers."""
    counts: NDArray[np.int64]
    """[S] rows of each sequence, at least 1."""
    starts: NDArray[np.int64]
    """[S] first position that each sequence computes: those before it are in the cache."""
    adapters: NDArray[np.int64] | None = None
    """[S] adapter slot of each sequence, -1 for none; None: no sequence uses an adapter."""

    @staticmethod
    def plan(
        tokens: NDArray[np.int64],
        tables: NDArray[np.int32],
        counts: NDArray[np.int64],
        starts: NDArray[np.int64],
        adapters: NDArray[np.int64] | None = None,
    ) -> StepRows:
        """The rows that `counts` and `starts` describe."""
        sequence = np.repeat(np.arange(len(counts)), counts)
        first_row = np.cumsum(counts) - counts
        positions = np.arange(len(sequence)) + (starts - first_row)[sequence]
        return StepRows(tokens, positions, sequence, tables, counts, starts, adapters)

    @property
    def pages(self) -> NDArray[np.int32]:
        """[T] page of each row's position."""
        return self.tables[self.sequence, self.positions // PAGE_TOKENS]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[T] offset within that page."""
        return self.positions & (PAGE_TOKENS - 1)
