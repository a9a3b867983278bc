"""Runs of decoding steps, optionally with drafts, as the structures that native code reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.inference.cache import PAGE_TOKENS
from etude.inference.native.structures import DraftLayers, DraftRun, Lookup
from etude.inference.native.weights import NativeDraftWeights
from etude.inference.sampling import above_zero
from etude.inference.sequences import Sequences
from etude.inference.speculation import CarriedStates, NgramLookup
from etude.model.kernels.native.matrices import address
from etude.records import SamplingParams


@dataclass(slots=True, eq=False)
class DecodingSteps:
    """Input and output of one run of decoding steps of N sessions, optionally with drafts. The run also
    writes the tokens and log-probabilities of `Sequences`."""

    rows: NDArray[np.int64]
    """[N] rows of `Sequences`."""
    most_steps: int
    most_positions: int
    """Most positions that the model computes, without the first step."""
    lengths: NDArray[np.int64]
    """[N] tokens of each session; in and out."""
    wanted: NDArray[np.int64]
    """[N] most drafts of each."""
    ready: NDArray[np.int64]
    """[N] drafts that draft layers have already put behind the tokens; in and out."""
    stops: Sequence[Collection[int]]
    noise: NDArray[np.float64]
    """[N, places] uniform draws for the positions after each session's tokens."""
    source: NgramLookup | CarriedStates | None
    """The drafter: n-gram lookup, or draft layers, given by their states; None without drafts."""
    drafted: NDArray[np.int64] = field(init=False)
    """[N] out: verified drafts."""
    accepted: NDArray[np.int64] = field(init=False)
    """[N] out: accepted drafts."""

    def __post_init__(self) -> None:
        self.drafted, self.accepted = np.zeros_like(self.lengths), np.zeros_like(self.lengths)


def sampling_columns(params: Sequence[SamplingParams]) -> dict[str, NDArray[Any]]:
    """Sampling parameters by the names of the structures' fields, one entry per request."""
    return {
        "temperatures": np.array([above_zero(p.temperature) for p in params], dtype=np.float32),
        "top_p": np.array([above_zero(p.top_p) for p in params], dtype=np.float32),
        "min_p": np.array([p.min_p for p in params], dtype=np.float32),
        "top_k": np.array([p.top_k for p in params], dtype=np.int64),
    }


class NativeRun:
    """The `DraftRun` structure of a run, and the memory that it points to."""

    def __init__(
        self,
        steps: DecodingSteps,
        sequences: Sequences,
        layers: NativeDraftWeights | None,
        vocabulary: int,
    ) -> None:
        """`layers`: weights of the draft layers, where `steps.source` is `CarriedStates`."""
        rows, routes = steps.rows, sequences.cache.routes
        adapters = sequences.adapters_of(rows)
        self._held: list[Any] = []
        most_pages = int(sequences.num_pages[rows].max())
        first_stops = np.cumsum([0, *map(len, steps.stops)])
        stop_tokens = np.array([token for row in steps.stops for token in row], dtype=np.int64)
        self.native = DraftRun(
            count=len(rows),
            steps=steps.most_steps,
            positions=steps.most_positions,
            most_drafts=int(steps.wanted.max()),
            max_tokens=sequences.max_tokens,
            lines=self._hold(rows),
            tokens=sequences.tokens.ctypes.data,
            logprobs=sequences.logprobs.ctypes.data,
            lengths=steps.lengths.ctypes.data,
            limits=self._hold(sequences.limit[rows]),
            rooms=self._hold(sequences.num_pages[rows] * PAGE_TOKENS),
            wanted=self._hold(steps.wanted),
            ready=steps.ready.ctypes.data,
            drafted=steps.drafted.ctypes.data,
            stood=steps.accepted.ctypes.data,
            first_stops=self._hold(first_stops),
            stops=self._hold(stop_tokens),
            noise=self._hold(steps.noise),
            noise_places=steps.noise.shape[1],
            tables=self._hold(sequences.tables[rows, :most_pages]),
            max_pages=most_pages,
            routes=routes.ctypes.data,
            route_layers=routes.shape[2],
            route_bytes=routes.itemsize,
            vocabulary=vocabulary,
            adapters=None if adapters is None else self._hold(adapters),
            **{name: self._hold(column) for name, column in sampling_columns(sequences.params(rows)).items()},
        )
        if isinstance(steps.source, NgramLookup):
            lookup = Lookup(steps.source.longest, steps.source.shortest)
            self._held.append(lookup)
            self.native.lookup = address(lookup)
        elif steps.source is not None:
            self._add_layers(steps.source, layers)

    def _add_layers(self, carried: CarriedStates, weights: NativeDraftWeights | None) -> None:
        assert weights is not None, "made with draft layers"
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
