"""One forward pass over the rows of an engine step, and the way PyTorch's operators compute it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import PagedCache, StepRows
from etude.inference.paged_attention import PagedAttention
from etude.inference.sampling import sample
from etude.model import DraftLayers, LanguageModel, RecordedRoutes
from etude.model.adapted_ops import AdaptedOps, Pair, Pairs
from etude.model.ops import Ops
from etude.records import SamplingParams

__all__ = ["EagerForward", "ForwardPass", "StepRows"]


class ForwardPass(Protocol):
    """Computes the rows of a step, with one model and one cache."""

    def load_weights(self) -> None:
        """Called after the model's weights have changed; perhaps in another thread, but never during a pass
        of the same object."""
        ...

    def pack_adapter(self, pairs: Mapping[str, Pair]) -> Any:
        """A copy of one adapter's factors, by the names of their weights, as `use_adapters` takes them.
        Perhaps in another thread."""
        ...

    def use_adapters(self, adapters: Sequence[Any]) -> None:
        """What rows may use from now on, by place (`StepRows.adapters`). Called between two passes."""
        ...

    def load_cache(self) -> None:
        """Called after the cache's memory has been let go or taken anew: what is kept of where it was must
        go."""
        ...

    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Final hidden states [T, width] and routes [T, MoE layers, top_k]; stores keys and values."""
        ...

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """See `etude.inference.sampling.sample`, from hidden states [N, width] on."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, width] -> [N, vocabulary] float32, from which raw and alternative log-probabilities
        are taken."""
        ...

    def draft_layer(self, index: int, rows: StepRows, hidden: Tensor) -> Tensor:
        """Draft layer `index` over `rows`, which hold the tokens that it is told: hidden [T, width] of the
        model, or of the layer before it, -> [T, width]. Stores keys and values in the draft layers' cache."""
        ...


class ModuleAdapters:
    """What passes that compute with the module do about adapters."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._adapters: Sequence[Pairs] = ()

    def pack_adapter(self, pairs: Mapping[str, Pair]) -> Pairs:
        """See ForwardPass."""
        packed: dict[int, Pair] = {}
        for name, (left, right) in pairs.items():
            weight = self._model.get_parameter(name)
            packed[id(weight)] = (left.to(weight.device, copy=True), right.to(weight.device, copy=True))
        return packed

    def use_adapters(self, adapters: Sequence[Pairs]) -> None:
        """See ForwardPass."""
        self._adapters = adapters

    @contextmanager
    def adapted(self, rows: StepRows) -> Iterator[None]:
        """Within it the module's passes use the adapters of `rows`."""
        if rows.adapters is None:
            yield
            return
        used = rows.adapters[rows.sequence]
        own = [torch.from_numpy(np.flatnonzero(used == slot)) for slot in range(len(self._adapters))]
        device = self._model.embedding.device
        places = [None if len(index) == len(used) else index.to(device) for index in own]

        def adapt(ops: Ops) -> Ops:
            return cast(Ops, AdaptedOps(ops, self._adapters, places))

        self._model.adapt = adapt
        try:
            yield
        finally:
            self._model.adapt = None


class EagerForward(ModuleAdapters):
    """The trainer's own module, operator by operator."""

    def __init__(self, model: LanguageModel, cache: PagedCache, drafts: DraftLayers | None = None) -> None:
        super().__init__(model)
        self._cache = cache
        self._drafts = drafts
        self._recorder = RecordedRoutes.of(model.config)

    def load_weights(self) -> None:
        """See ForwardPass: the module's own tensors are used as they are."""

    def load_cache(self) -> None:
        """See ForwardPass: nothing is kept."""

    @torch.no_grad()
    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
        attention = PagedAttention(self._cache, rows)
        with self.adapted(rows):
            hidden = self._model(tokens, positions, attention, self._recorder)
        return hidden, self._recorder.take(len(tokens))

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        return sample(self.logits(hidden), params, draws)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ForwardPass."""
        return self._model.logits(hidden)

    @torch.no_grad()
    def draft_layer(self, index: int, rows: StepRows, hidden: Tensor) -> Tensor:
        """See ForwardPass."""
        assert self._drafts is not None and self._cache.drafts is not None, "made together"
        tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
        attention = PagedAttention(self._cache.drafts, rows)
        return self._drafts(self._model, index, hidden, tokens, positions, attention)
