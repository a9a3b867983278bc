"""A client of the engine that keeps and checks the same records as an agent's session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from etude.errors import PrefixMissError
from etude.inference import Answer, Engine
from etude.inference.cache import PagedCache
from etude.inference.engine import Kernels
from etude.model import LanguageModel, PackedAttention, RecordedRoutes
from etude.model.scoring import score_sequences
from etude.native import find_compiler
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams
from etude.weights import MemoryWeights
from tests.model.builders import VOCAB, random_tokens, small_config, small_model


def version(step: int) -> PolicyVersion:
    return PolicyVersion("run", step)


def serve(engine: Engine, model: LanguageModel, step: int, kv: Any = "keep") -> PolicyVersion:
    """Brings `model` into service as version `step`."""
    manifest = MemoryWeights().publish(version(step), dict(model.named_parameters()))
    engine.stage(manifest.version, {name: p.detach() for name, p in model.named_parameters()})
    engine.activate(manifest.version, kv)
    return manifest.version


needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
ALL_KERNELS = ["eager", pytest.param("native", marks=needs_compiler)]


def small_engine(
    model: LanguageModel | None = None,
    num_sessions: int = 4,
    max_tokens: int = 100,
    prefill_tokens: int = 256,
    kernels: Kernels = "eager",
    **options: Any,
) -> Engine:
    """An engine that serves `model` as version 0."""
    model = model or small_model()
    engine = Engine(model.config, VOCAB, num_sessions, max_tokens, prefill_tokens, kernels, **options)
    serve(engine, model, 0)
    return engine


def empty_engine() -> Engine:
    """An engine without weights."""
    return Engine(small_config(), VOCAB, 2, 64)


@torch.no_grad()
def fresh_routes(model: LanguageModel, tokens: NDArray[np.int32]) -> NDArray[Any]:
    """Routes [T, MoE layers, top_k] of one forward pass over the whole sequence."""
    recorder = RecordedRoutes.of(model.config)
    ids = torch.from_numpy(tokens.astype(np.int64))
    model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]), recorder)
    return recorder.pop_routes(len(ids)).numpy()


class Client:
    """One session: what it sent, what it got, and where each token came from."""

    def __init__(self, name: str, key: int) -> None:
        self.name = name
        self.tokens: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.routes: dict[int, NDArray[Any]] = {}
        self.versions: dict[int, PolicyVersion] = {}
        self.kv_oldest: dict[int, PolicyVersion] = {}
        self.finish: str | None = None
        self.misses = 0
        self._key = key
        self._digest: str | None = None
        self._requests = 0
        self._unsent: list[int] = []

    def request(self, suffix: Sequence[int], /, **options: Any) -> SampleRequest:
        """The request that appends `suffix`; options of SamplingParams or of SampleRequest."""
        self._take_given(suffix)
        params: dict[str, Any] = {
            name: options.pop(name) for name in tuple(options) if name in SamplingParams.__dataclass_fields__
        }
        self._requests += 1
        fields: dict[str, Any] = {
            "id": f"{self.name}:{self._requests}",
            "session_id": self.name,
            "suffix": np.array(self._unsent if self._digest is not None else self.tokens, dtype=np.int32),
            "params": SamplingParams(**{"max_tokens": 6, **params}),
            "stop_tokens": frozenset(),
            "rng_key": (self._key,),
            "prefix_digest": self._digest,
        }
        return SampleRequest(**(fields | options))

    def ask(self, engine: Engine, suffix: Sequence[int], **options: Any) -> SampleRequest:
        """Submits; where the prefix is no longer held, sends everything."""
        request = self.request(suffix, **options)
        try:
            engine.submit(request)
        except PrefixMissError:
            self.miss()
            request = self.request([], **options)
            engine.submit(request)
        return request

    def miss(self) -> None:
        self._digest = None
        self.misses += 1

    def take(self, chunk: SampleChunk) -> None:
        for token, logprob in zip(chunk.tokens.tolist(), chunk.logprobs.tolist(), strict=True):
            self.versions[len(self.tokens)] = chunk.version
            self.kv_oldest[len(self.tokens)] = chunk.kv_oldest
            self._append(token, sampled=True, logprob=logprob)
        if chunk.routes is not None:
            for offset, row in enumerate(chunk.routes):
                self.routes[chunk.routes_start + offset] = row
        if chunk.finish is not None:
            self.finish, self._digest, self._unsent = chunk.finish, chunk.prefix_digest, []

    def check(self, model: LanguageModel, temperature: float = 1.0) -> None:
        """Log-probabilities and routes are those of a fresh pass over the whole sequence."""
        self.check_logprobs(model, temperature)
        tokens = np.array(self.tokens, dtype=np.int32)
        assert sorted(self.routes) == list(range(len(tokens) - 1)), "all but the last position are computed"
        routes = np.stack([self.routes[position] for position in sorted(self.routes)])
        np.testing.assert_array_equal(routes, fresh_routes(model, tokens)[:-1])

    def check_logprobs(self, model: LanguageModel, temperature: float = 1.0) -> None:
        """Log-probabilities are those of a fresh pass over the whole sequence."""
        tokens, sampled = np.array(self.tokens, dtype=np.int32), np.array(self.sampled)
        scores = score_sequences(model, [tokens], temperature=temperature)[0]
        np.testing.assert_allclose(np.array(self.logprobs)[sampled], scores[sampled], atol=1e-5, rtol=0)

    def _take_given(self, suffix: Sequence[int]) -> None:
        for token in suffix:
            self._append(token, sampled=False, logprob=0.0)
        self._unsent += suffix

    def _append(self, token: int, *, sampled: bool, logprob: float) -> None:
        self.tokens.append(token)
        self.sampled.append(sampled)
        self.logprobs.append(logprob)


def prompt(length: int, seed: int) -> list[int]:
    return random_tokens(length, seed).tolist()


def drain(engine: Engine, clients: Sequence[Client]) -> list[Answer]:
    """Steps until nothing is left to do; hands every answer to its client."""
    by_name = {client.name: client for client in clients}
    finished: list[Answer] = []
    while engine.has_work:
        for answer in engine.step():
            deliver(by_name, answer)
            finished.append(answer)
    return finished


def deliver(by_name: dict[str, Client], answer: Answer) -> None:
    for chunk in answer.chunks:
        by_name[answer.request.session_id].take(chunk)


def cache_bytes(cache: PagedCache) -> int:
    """Memory of keys and values."""
    return sum(store.nbytes for store in (cache.keys, cache.values) if store is not None)


def held_bytes(engine: Engine) -> int:
    """Memory of keys and values, and of the weights as modules have them."""
    runners = {id(one): one for one in (engine._weights.active, engine._weights._spare) if one is not None}
    weights = sum(parameter.nbytes for one in runners.values() for parameter in one.model.parameters())
    return weights + sum(cache_bytes(one) for one in (engine._cache, engine._cache.drafts) if one is not None)
