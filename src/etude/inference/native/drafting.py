"""Runs of decoding steps, optionally with drafts, as the structures that native code reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.inference.cache import PAGE_TOKENS
from etude.inference.native.structures import DraftLayers, DraftRun, Lookup
from etude.inference.native.weights import NativeDraftWeights
from etude.inference.sampling import above_zero, uniforms
from etude.inference.sequences import Sequences
from etude.inference.speculation import CarriedStates, NgramLookup
from etude.model.kernels.native.matrices import address
from etude.records import SamplingParams


def sampling_columns(params: Sequence[SamplingParams]) -> dict[str, NDArray[Any]]:
    """Sampling parameters by the names of the structures' fields, one entry per request."""
    return {
        "temperatures": np.array([above_zero(p.temperature) for p in params], dtype=np.float32),
        "top_p": np.array([above_zero(p.top_p) for p in params], dtype=np.float32),
        "min_p": np.array([p.min_p for p in params], dtype=np.float32),
        "top_k": np.array([p.top_k for p in params], dtype=np.int64),
    }


class DecodingRun:
    """A run of decoding steps of N sessions: the structure that native code reads and writes, and the memory
    that it points to. Native code also writes the tokens and log-probabilities of `Sequences`."""

    def __init__(
        self,
        sequences: Sequences,
        rows: NDArray[np.int64],
        most_steps: int,
        wanted: NDArray[np.int64],
        ready: NDArray[np.int64],
        source: NgramLookup | CarriedStates | None,
        layers: NativeDraftWeights | None,
        vocabulary: int,
    ) -> None:
        """`rows` [N] of `Sequences`; `wanted` [N]: most drafts of each; `ready` [N]: drafts that draft layers
        have already put behind the tokens; `source`: of further drafts, n-gram lookup or the states of
        `layers`; None without drafts."""
        self.num_steps = 0
        """Steps that were computed; out."""
        self.lengths = sequences.length[rows]
        """[N] tokens of each session; in and out."""
        self.ready = ready
        """[N] in and out."""
        self.drafted, self.accepted = np.zeros_like(rows), np.zeros_like(rows)
        """[N] verified drafts, and accepted drafts among them; out."""
        self._held: list[Any] = []
        routes, stops, most_drafts = sequences.cache.routes, sequences.stops(rows), int(wanted.max())
        adapters = sequences.adapters_of(rows)
        most_pages = int(sequences.num_pages[rows].max())
        remaining = int((sequences.limit[rows] - self.lengths).max())
        places = min(most_steps * (1 + most_drafts), remaining) + most_drafts
        noise = uniforms(sequences.key[rows][:, None], self.lengths[:, None] + np.arange(places))
        self.native = DraftRun(
            count=len(rows),
            steps=most_steps,
            positions=most_steps * len(rows),
            most_drafts=most_drafts,
            max_tokens=sequences.max_tokens,
            lines=self._hold(rows),
            tokens=sequences.tokens.ctypes.data,
            logprobs=sequences.logprobs.ctypes.data,
            lengths=self.lengths.ctypes.data,
            limits=self._hold(sequences.limit[rows]),
            rooms=self._hold(sequences.num_pages[rows] * PAGE_TOKENS),
            wanted=self._hold(wanted),
            ready=ready.ctypes.data,
            drafted=self.drafted.ctypes.data,
            stood=self.accepted.ctypes.data,
            first_stops=self._hold(np.cumsum([0, *map(len, stops)])),
            stops=self._hold(np.array([token for row in stops for token in row], dtype=np.int64)),
            noise=self._hold(noise),
            noise_places=places,
            tables=self._hold(sequences.tables[rows, :most_pages]),
            max_pages=most_pages,
            routes=routes.ctypes.data,
            route_layers=routes.shape[2],
            route_bytes=routes.itemsize,
            vocabulary=vocabulary,
            adapters=None if adapters is None else self._hold(adapters),
            **{name: self._hold(column) for name, column in sampling_columns(sequences.params(rows)).items()},
        )
        if isinstance(source, NgramLookup):
            lookup = Lookup(source.longest, source.shortest)
            self._held.append(lookup)
            self.native.lookup = address(lookup)
        elif source is not None:
            assert layers is not None, "made with draft layers"
            self._add_layers(source, layers)

    def _add_layers(self, carried: CarriedStates, weights: NativeDraftWeights) -> None:
        layers = DraftLayers(
            model=address(weights.model),
            layers=address(weights.layers),
            entrances=address(weights.entrances),
            depth=carried.depth,
            carried=carried.hidden.data_ptr(),
            carried_counts=carried.counts.ctypes.data,
            carried_ends=carried.ends.ctypes.data,
        )
        self._held.append(layers)
        self.native.layers = address(layers)

    def _hold(self, array: NDArray[Any]) -> int:
        """Address of the contiguous values, which are kept alive as long as the run."""
        array = np.ascontiguousarray(array)
        self._held.append(array)
        return array.ctypes.data
