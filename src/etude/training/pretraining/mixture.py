"""A mixture of sources: the order in which documents are drawn, and how often each was.

    source A  pass 0: pieces in a random order, pass 1, ...         \\
    source B  ...                                                     >-- the one furthest behind its weight
    source C  ...                                                    /                |
                                                            pool of pieces drawn ahead
                                                                                      |
                      step: the oldest while they fit, then the largest that fits (best fit)

A pass is one reading of a source with one window. Only the order of a pass and the rearrangement of a piece
for infilling are random, and both are functions of (seed, source, pass, piece). The state is small enough to
be saved with every checkpoint, and determines exactly which tokens were trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.errors import CheckpointError, ConfigError
from etude.training.pretraining.documents import Document
from etude.training.pretraining.sources import Pieces, Source


class _Drawn(NamedTuple):
    """The origin of a drawn piece."""

    source: int
    number: int
    """Number of the pass."""
    piece: int


@dataclass(slots=True, eq=False)
class _Reading:
    """Progress in reading one source."""

    source: Source
    passes: list[list[int]] = field(default_factory=list[list[int]])
    """Per pass its window and the number of pieces drawn in it; the last one is in progress."""
    drawn_tokens: int = 0
    epochs: int = 0
    """Completed passes."""
    pieces: Pieces = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    order: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def exhausted(self) -> bool:
        """Whether it may not be read any more."""
        limit = self.source.config.max_epochs
        return not len(self.order) or (limit > 0 and self.epochs >= limit)


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """Totals of what was trained on from one source."""

    documents: int
    """Number of its documents that are not held out and are offered for training."""
    tokens: int
    """Number of tokens trained on."""
    epochs: int
    """Completed passes, including pieces drawn ahead."""
    times_seen: dict[int, int]
    """Number of documents by how often each was read completely."""


class Mixture:
    """Draws steps from sources by weight. Implements Batches."""

    def __init__(
        self, sources: Sequence[Source], tokens_per_step: int, pool_tokens: int, window: int, seed: int
    ) -> None:
        """A step has at most `tokens_per_step` tokens, or one longer piece. Sources of weight 0 are left out.

        Raises ConfigError if no source, or no document of a source, is left.
        """
        self._tokens_per_step = tokens_per_step
        self._pool_tokens = max(pool_tokens, tokens_per_step)
        self._seed = seed
        self._window = window
        self._readings = [_Reading(source) for source in sources if source.config.weight > 0]
        for reading in self._readings:
            self._begin_pass(reading)
            if not len(reading.pieces):
                raise ConfigError(
                    f"has nothing to train on with a window of {window} tokens",
                    field=f"source {reading.source.name}",
                    received=f"{len(reading.source.lengths)} documents",
                    fix="hold out less, widen the window, or name another path",
                )
        if not self._readings:
            raise ConfigError("none has a weight above 0", field="sources")
        self._pool: list[tuple[_Drawn, Document]] = []
        self._fill = 0.0
        self._refill()

    @property
    def exhausted(self) -> bool:
        return not self._pool

    def set_window(self, window: int) -> None:
        """Sets the maximum length of pieces that are drawn from now on; each source begins another pass. The
        pool is unchanged."""
        if window == self._window:
            return
        self._window = window
        for reading in self._readings:
            self._begin_pass(reading)

    def draw(self) -> list[Document]:
        room, chosen = self._tokens_per_step, []
        while self._pool:
            place = 0
            if len(self._pool[0][1].tokens) > room and chosen:
                fitting = [i for i, (_, document) in enumerate(self._pool) if len(document.tokens) <= room]
                if not fitting:
                    break
                place = max(fitting, key=lambda i: (len(self._pool[i][1].tokens), -i))
            document = self._pool.pop(place)[1]
            room -= len(document.tokens)
            chosen.append(document)
        self._fill = 1.0 - room / self._tokens_per_step
        self._refill()
        return chosen

    def figures(self) -> Mapping[str, float]:
        """See Batches: how full the step is; by source, passes so far and share of the drawn tokens."""
        total = sum(reading.drawn_tokens for reading in self._readings)
        found = {"fill": self._fill}
        for reading in self._readings:
            name, place = reading.source.name, reading.passes[-1][1] / max(1, len(reading.order))
            found[f"epochs/{name}"] = reading.epochs + place % 1.0
            found[f"share/{name}"] = reading.drawn_tokens / total
        return found

    def seen_tokens(self, name: str) -> NDArray[np.int64]:
        """[documents of the source] exact number of tokens of each that were targets so far.

        A document of n tokens has n - 1 targets in one pass.
        """
        reading = next(reading for reading in self._readings if reading.source.name == name)
        seen = np.zeros(len(reading.source.lengths), dtype=np.int64)
        for number, (window, num_drawn) in enumerate(reading.passes):
            pieces = reading.source.pieces(window)
            drawn = pieces[self._order(reading.source, number, len(pieces))[:num_drawn]]
            np.add.at(seen, drawn[:, 0], drawn[:, 2] - drawn[:, 1] - 1)
        for drawn, _ in self._pool:
            if self._readings[drawn.source] is reading:
                document, begin, end = self._pieces_of(drawn)[drawn.piece]
                seen[document] -= end - begin - 1
        return seen

    def accounts(self) -> dict[str, SourceAccount]:
        """Totals of what was trained on, by source."""
        found: dict[str, SourceAccount] = {}
        for reading in self._readings:
            name, seen = reading.source.name, self.seen_tokens(reading.source.name)
            offered = np.unique(reading.source.pieces(self._window)[:, 0])
            times = seen[offered] // (reading.source.lengths[offered] - 1)
            counts = sorted(Counter(times.tolist()).items())
            found[name] = SourceAccount(len(offered), int(seen.sum()), reading.epochs, dict(counts))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": self._window,
            "sources": {
                reading.source.name: {
                    "digest": reading.source.digest,
                    "passes": [list(entry) for entry in reading.passes],
                    "drawn_tokens": reading.drawn_tokens,
                    "epochs": reading.epochs,
                }
                for reading in self._readings
            },
            "pool": [list(drawn) for drawn, _ in self._pool],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        digests = {reading.source.name: reading.source.digest for reading in self._readings}
        stored = {name: values["digest"] for name, values in state["sources"].items()}
        if stored != digests:
            changed = sorted({*stored.items()} ^ {*digests.items()})
            raise CheckpointError(
                "the documents differ from those that the run started with",
                field="sources",
                received=sorted({name for name, _ in changed}) or list(digests),
                fix="restore the files and the configuration, or start another run",
            )
        if list(stored) != list(digests):
            raise CheckpointError("are in another order", field="sources", received=list(digests))
        self._window = state["window"]
        for reading in self._readings:
            values = state["sources"][reading.source.name]
            reading.passes = [list(entry) for entry in values["passes"]]
            reading.drawn_tokens, reading.epochs = values["drawn_tokens"], values["epochs"]
            self._open_pass(reading)
        drawn = [_Drawn(*entry) for entry in state["pool"]]
        self._pool = [(entry, self._read(entry)) for entry in drawn]

    def _refill(self) -> None:
        ahead = sum(len(document.tokens) for _, document in self._pool)
        while ahead < self._pool_tokens:
            open_readings = [i for i, reading in enumerate(self._readings) if not reading.exhausted]
            if not open_readings:
                break
            index = min(open_readings, key=self._progress)
            entry = self._draw_from(index)
            document = self._read(entry)
            self._readings[index].drawn_tokens += len(document.tokens)
            self._pool.append((entry, document))
            ahead += len(document.tokens)

    def _progress(self, index: int) -> tuple[float, int]:
        reading = self._readings[index]
        return reading.drawn_tokens / reading.source.config.weight, index

    def _draw_from(self, index: int) -> _Drawn:
        reading = self._readings[index]
        number, num_drawn = len(reading.passes) - 1, reading.passes[-1][1]
        reading.passes[-1][1] += 1
        entry = _Drawn(index, number, int(reading.order[num_drawn]))
        if num_drawn + 1 == len(reading.order):
            reading.epochs += 1
            if not reading.exhausted:
                self._begin_pass(reading)
        return entry

    def _begin_pass(self, reading: _Reading) -> None:
        reading.passes.append([self._window, 0])
        self._open_pass(reading)

    def _open_pass(self, reading: _Reading) -> None:
        reading.pieces = reading.source.pieces(reading.passes[-1][0])
        reading.order = self._order(reading.source, len(reading.passes) - 1, len(reading.pieces))

    def _order(self, source: Source, number: int, count: int) -> NDArray[np.int64]:
        return np.random.default_rng((self._seed, _key(source), number)).permutation(count)

    def _pieces_of(self, drawn: _Drawn) -> Pieces:
        reading = self._readings[drawn.source]
        if drawn.number == len(reading.passes) - 1:
            return reading.pieces
        return reading.source.pieces(reading.passes[drawn.number][0])

    def _read(self, drawn: _Drawn) -> Document:
        source = self._readings[drawn.source].source
        random = np.random.default_rng((self._seed, _key(source), drawn.number, drawn.piece))
        window = self._readings[drawn.source].passes[drawn.number][0]
        return source.read(self._pieces_of(drawn)[drawn.piece], window, random)


def _key(source: Source) -> int:
    return xxhash.xxh32_intdigest(source.name.encode())
