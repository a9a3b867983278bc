"""Parity of trainer and engine for any checkpoint: for `etude doctor parity` and the benchmark.

    sessions ──sample──> tokens, log-probabilities, routes   (decoding: as rollouts pass to the trainer)
             ──score───> log-probabilities, routes           (prefill: as a run's parity gate compares)

Both are compared with the trainer's own scores of the same tokens: with experts chosen by its own router, and
with those that the engine recorded, with which a run trains unless configured otherwise.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from etude.config import RunConfig
from etude.controller.compute import choose_place, place_model, resolve_numerics, use_numerics
from etude.controller.engines import LocalService, SampledModel, make_engine, serve_model
from etude.errors import ConfigError
from etude.inference import EngineService
from etude.inference.vllm import ModelSnapshots, SnapshotDirectory, make_vllm_sampler
from etude.kit.tasks import run_together
from etude.model import LanguageModel, missing_route
from etude.model.loading import AnyModel
from etude.model.scoring import PackedSequences, device_of, score_sequences
from etude.protocols import Sampler
from etude.records import SampleChunk, SampleRequest, SamplingParams
from etude.training.parity import ParityFigures, compare_logprobs
from etude.weights import MemoryWeights, WeightPublisher

SCORED, SAMPLED = "scored", "sampled"
REPLAYED = ", routes replayed"
_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class PlayedSequence:
    """One session's tokens [T], and the engine's results for them."""

    tokens: NDArray[np.int32]
    num_prompt: int
    sampled_logprobs: NDArray[np.float32]
    """[T - num_prompt] from decoding."""
    sampled_routes: NDArray[Any] | None
    """[T, MoE layers, top_k]: `missing_route` where nothing was recorded, as for the last token."""
    scored_logprobs: NDArray[np.float32]
    """[T] from prefill."""
    scored_routes: NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Figures by comparison."""

    figures: dict[str, ParityFigures] = field(default_factory=dict[str, ParityFigures])
    """`scored` and `sampled`, each also with routes replayed in a mixture of experts."""
    routes_differing: float | None = None
    """Share of (position, layer) at which trainer and engine choose other experts; None for dense models."""

    @property
    def deciding(self) -> dict[str, ParityFigures]:
        """The comparisons that a run depends on: those with replay, where there are routes."""
        replayed = {name: f for name, f in self.figures.items() if name.endswith(REPLAYED)}
        return replayed or self.figures

    def passes(self, limit: float, *, exact: bool = False) -> bool:
        """Whether all deciding figures pass; `exact`: whether all comparisons are equal bit for bit."""
        if exact:
            return all(figures.exact for figures in self.figures.values())
        return all(figures.passes(limit) for figures in self.deciding.values())

    def to_json(self) -> dict[str, Any]:
        """All figures, and the share of routes that differ."""
        figures = {name: compared.to_json() for name, compared in self.figures.items()}
        return {"figures": figures, "routes_differing": self.routes_differing}


async def play(
    sampler: Sampler, prompts: Sequence[NDArray[np.int32]], num_tokens: int
) -> list[PlayedSequence]:
    """Continues each prompt to `num_tokens` tokens in all, concurrently, and then scores each sequence.

    The sampler must serve the same version throughout. Raises SamplerError.
    """
    played = await run_together(
        _sample(sampler, number, prompt, num_tokens - len(prompt)) for number, prompt in enumerate(prompts)
    )
    sequences: list[PlayedSequence] = []
    for prompt, chunks in zip(prompts, played, strict=True):
        tokens = np.concatenate([prompt, *(chunk.tokens for chunk in chunks)]).astype(np.int32)
        scores = await sampler.score(tokens, chunks[-1].version)
        sequences.append(
            PlayedSequence(
                tokens,
                len(prompt),
                np.concatenate([chunk.logprobs for chunk in chunks]),
                _assemble_routes(chunks, len(tokens)),
                scores.logprobs,
                scores.routes,
            )
        )
    return sequences


def compare(
    model: AnyModel, played: Sequence[PlayedSequence], micro_batch_sequences: int = 8
) -> ParityReport:
    """Scores the sequences by the trainer's model, `micro_batch_sequences` at a time, and compares."""
    tokens = [sequence.tokens for sequence in played]
    scorer = cast(LanguageModel, model)  # TransformersModel answers the same calls

    def trainer(routes: list[NDArray[Any]] | None) -> list[NDArray[np.float32]]:
        scored: list[NDArray[np.float32]] = []
        for start in range(0, len(tokens), micro_batch_sequences):
            part = slice(start, start + micro_batch_sequences)
            scored += score_sequences(scorer, tokens[part], routes=None if routes is None else routes[part])
        return scored

    figures: dict[str, ParityFigures] = {}
    scored_routes = [s.scored_routes for s in played if s.scored_routes is not None]
    sampled_routes = [s.sampled_routes for s in played if s.sampled_routes is not None]
    own = trainer(None)
    figures[SCORED] = compare_logprobs(own, [s.scored_logprobs for s in played])
    figures[SAMPLED] = _compare_sampled(own, played)
    if len(scored_routes) == len(sampled_routes) == len(played):
        figures[SCORED + REPLAYED] = compare_logprobs(
            trainer(scored_routes), [s.scored_logprobs for s in played]
        )
        figures[SAMPLED + REPLAYED] = _compare_sampled(trainer(sampled_routes), played)
    differing = None
    if scored_routes and model.num_experts:
        differing = _share_differing(_own_routes(model, tokens), scored_routes)
    return ParityReport(figures, differing)


def random_prompts(vocab_size: int, num_sequences: int, seed: int) -> list[NDArray[np.int32]]:
    """Short prompts of random tokens, for checkpoints without known texts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, _PROMPT_TOKENS).astype(np.int32) for _ in range(num_sequences)]


def text_prompts(tokens: NDArray[np.int32], num_sequences: int, length: int) -> list[NDArray[np.int32]]:
    """`num_sequences` evenly spaced pieces of a text. Raises ConfigError if it is too short."""
    if len(tokens) < 2 * num_sequences:
        raise ConfigError(
            f"too short for {num_sequences} prompts",
            field="--text",
            received=f"{len(tokens)} tokens",
            fix="name a longer text, or ask for fewer --sequences",
        )
    step = len(tokens) // num_sequences
    return [tokens[i * step : i * step + min(step, length)] for i in range(num_sequences)]


async def _sample(
    sampler: Sampler, number: int, prompt: NDArray[np.int32], max_tokens: int
) -> list[SampleChunk]:
    session = f"parity-{number}"
    params = SamplingParams(max_tokens=max_tokens)
    request = SampleRequest(session, session, prompt, params, frozenset(), (0, number))
    sampler.open(session)
    try:
        return [chunk async for chunk in sampler.stream(request)]
    finally:
        sampler.close(session)


def _assemble_routes(chunks: Sequence[SampleChunk], length: int) -> NDArray[Any] | None:
    """The chunks' routes, for every position; later ones replace earlier ones."""
    recorded = [(chunk.routes_start, chunk.routes) for chunk in chunks if chunk.routes is not None]
    if not recorded:
        return None
    first = recorded[0][1]
    missing = missing_route(torch.from_numpy(first[:0].copy()).dtype)
    routes = np.full((length, *first.shape[1:]), missing, dtype=first.dtype)
    for start, rows in recorded:
        routes[start : start + len(rows)] = rows
    return routes


def _compare_sampled(
    trainer: Sequence[NDArray[np.float32]], played: Sequence[PlayedSequence]
) -> ParityFigures:
    """Compares sampled tokens alone; a zero stands in for the first one, which has no score."""
    ours = [scores[s.num_prompt - 1 :] for scores, s in zip(trainer, played, strict=True)]
    theirs = [np.concatenate(([np.float32(0)], s.sampled_logprobs)) for s in played]
    return compare_logprobs(ours, theirs)


@torch.no_grad()
def _own_routes(model: AnyModel, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[Any]]:
    """[T, MoE layers, top_k] of each sequence, chosen by the model's own router."""
    routes: list[NDArray[Any]] = []
    for tokens in sequences:
        batch, recorder = PackedSequences.pack([tokens], device_of(model)), model.recorder()
        model(batch.tokens, batch.positions, model.ops.packed_attention(batch.attention), recorder)
        routes.append(recorder.pop_routes().cpu().numpy())
    return routes


def _share_differing(ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> float:
    """Share of (position, layer) at which the sets of experts differ, whatever their order."""
    differ = [
        (np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(axis=-1).ravel()
        for a, b in zip(ours, theirs, strict=True)
    ]
    return float(np.concatenate(differ).mean())


async def measure_parity(
    model: AnyModel, config: RunConfig, prompts: Sequence[NDArray[np.int32]], num_tokens: int
) -> ParityReport:
    """Continues each prompt to `num_tokens` tokens, and compares. Of `config` only the settings of both
    sides' computation are used: `device`, `dtype`, `numerics`, `engine`.

    Replaces the model's operations by those that `config` names. Raises ConfigError or ResourceError for
    settings that are not available, InfrastructureError if the engine fails.
    """
    if isinstance(model, LanguageModel):
        config = resolve_numerics(config.model_copy(update={"model": model.config}))
    place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
    sizes = {
        "agent": config.agent.model_copy(update={"max_tokens": num_tokens}),
        "engine": config.engine.model_copy(update={"num_slots": len(prompts)}),
    }
    config = config.model_copy(update={"device": place.device, "dtype": place.dtype, **sizes})
    async with _open(model, config) as (weights, service):
        use_numerics(place_model(model, config), config)
        await serve_model(weights, service, model, "parity")
        played = await play(service, prompts, num_tokens)
    return compare(model, played)


@contextlib.asynccontextmanager
async def _open(model: AnyModel, config: RunConfig) -> AsyncIterator[tuple[WeightPublisher, LocalService]]:
    if config.engine.backend == "vllm":
        sampler = make_vllm_sampler(
            config.engine.vllm,
            routed=model.num_experts > 0,
            dtype=config.dtype,
            max_tokens=config.agent.max_tokens + 1,
        )
        with tempfile.TemporaryDirectory(prefix="etude-parity-") as directory:
            async with sampler:
                yield ModelSnapshots(SnapshotDirectory(Path(directory)), model), sampler
        return
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            "Étude's engine does not implement this architecture",
            field="engine.backend",
            received=config.engine.backend,
            fix="compare such a model with vLLM",
        )
    weights, engine = MemoryWeights(), make_engine(config, SampledModel.of(model))
    async with EngineService(engine, weights.fetch, None) as service:
        yield weights, service
