"""Keys, values and routes in pages of 16 tokens, and how a step names the pages that it works on.

A session's positions 16 i .. 16 i + 15 lie in the i-th page of its table, wherever that page is. Pages are
shared between sessions with a common prefix; who owns which page is the business of `radix.py`.
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
    """Pages that hold so many tokens; None for 0, which leaves the choice to the engine."""
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
    """Memory that one page's keys, values and routes take."""
    width = config.key_dim + (0 if config.value_is_key_prefix else config.value_dim)
    routes = config.num_moe_layers * config.routes_per_token * np.dtype(config.route_dtype).itemsize
    element_bytes = 2 if dtype == "bfloat16" else 4
    return PAGE_TOKENS * (element_bytes * config.num_layers * config.cache_heads * width + routes)


class PagedCache:
    """The storage: what each page holds of each of its positions."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """On a CPU memory is only taken for pages that are written. Routes are always the CPU's."""
        self._config = config
        self._device, self._dtype = device or torch.device("cpu"), dtype
        self.num_pages = num_pages
        self.drafts: PagedCache | None = None
        """What draft layers hold of the same pages."""
        self.value_dim = config.value_dim
        self.keys: Tensor
        """[layers, pages, cache_heads, key_dim, 16]: transposed, so that 16 scores are one vector."""
        self.values: Tensor | None = None
        """[layers, pages, cache_heads, 16, value_dim]; None where values are the first part of the keys."""
        self._allocate(num_pages)
        route_shape = (num_pages, PAGE_TOKENS, config.num_moe_layers, config.routes_per_token)
        self.routes: NDArray[Any] = np.zeros(route_shape, dtype=config.route_dtype)
        """[pages, 16, MoE layers, top_k]: of the pass that computed the position's keys."""

    @property
    def is_held(self) -> bool:
        """Whether there is memory behind the pages."""
        return self.keys.shape[1] == self.num_pages

    def release(self) -> None:
        """Lets keys and values go with their memory; what pointed into it must be updated."""
        self._allocate(0)
        if self.drafts is not None:
            self.drafts.release()

    def hold(self) -> None:
        """Takes memory for all pages again, at another place: every page is as if it had never been
        written."""
        self._allocate(self.num_pages)
        if self.drafts is not None:
            self.drafts.hold()

    def _allocate(self, num_pages: int) -> None:
        config = self._config
        shape = (config.num_layers, num_pages, config.cache_heads)
        key_shape = (*shape, config.key_dim, PAGE_TOKENS)
        self.keys = self._zeros(key_shape)
        if not config.value_is_key_prefix:
            value_shape = (*shape, PAGE_TOKENS, config.value_dim)
            self.values = self._zeros(value_shape)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type == "cpu":
            return StreamedMemory().take(shape, self._dtype)
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
    """What one step computes: T rows, each one position of one of S sequences.

    Rows of one sequence are consecutive, their positions ascending. All arrays are C-contiguous.
    """

    tokens: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T]"""
    sequence: NDArray[np.int64]
    """[T] row of `tables`."""
    tables: NDArray[np.int32]
    """[S, most pages of any] page of each 16 positions; what lies past a sequence's last page means nothing,
    but is the number of some page."""
    counts: NDArray[np.int64]
    """[S] rows of each sequence, at least 1."""
    starts: NDArray[np.int64]
    """[S] first position that each sequence computes: those before are in the cache."""
    adapters: NDArray[np.int64] | None = None
    """[S] which of the pass's adapters each sequence uses, -1 for none; None: nobody uses any."""

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
        """[T] page in which each row's keys are stored."""
        return self.tables[self.sequence, self.positions // PAGE_TOKENS]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[T] place within that page."""
        return self.positions & (PAGE_TOKENS - 1)
