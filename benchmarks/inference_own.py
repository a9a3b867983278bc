"""Our engine alone, in the inference benchmark: prefix reuse, routes, weight updates, rooflines."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import kernels
import numpy as np
import torch
from common import Figures, median_ratio
from inference_work import LARGE, Scenario, as_json, longest_tokens
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.inference import Engine, EngineService
from etude.inference.forward import ForwardPass
from etude.model import LanguageModel, build_model
from etude.records import PolicyVersion, SampleRequest, SamplingParams
from etude.weights import MemoryWeights

_VERSION = PolicyVersion("bench", 0)
_SESSION_TOKENS, _MORE_TOKENS = 2000, 64
_SWAPS = 8


def make_engine(model: LanguageModel, num_sessions: int, max_tokens: int) -> Engine:
    """An engine with native kernels on one thread that serves the model's weights."""
    engine = Engine(model.config, model.vocab_size, num_sessions, max_tokens, kernels="native")
    engine.stage(_VERSION, dict(model.named_parameters()))
    engine.activate(_VERSION)
    return engine


def make_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """A model with random weights of seed 0."""
    model = build_model(config, vocab_size)
    model.initialise(0)
    return model


def request(
    session: str, number: int, suffix: Sequence[int] | NDArray[Any], output: int, digest: str | None
) -> SampleRequest:
    """The request of one turn, without stop tokens."""
    return SampleRequest(
        id=f"{session}:{number}",
        session_id=session,
        suffix=np.array(suffix, dtype=np.int32),
        params=SamplingParams(max_tokens=output),
        stop_tokens=frozenset(),
        rng_key=(0, *session.encode()),
        prefix_digest=digest,
    )


def run_request(engine: Engine, asked: SampleRequest) -> str | None:
    """Runs a single request to its end; returns the digest of the session's prefix."""
    engine.submit(asked)
    while True:
        for done in engine.step():
            if done.is_last:
                return done.chunks[-1].prefix_digest


def second_turn_share(model: LanguageModel, repeats: int) -> float:
    """Processor time of 64 more tokens in a session of 2,000, over that of all 2,064 at once."""
    engine = make_engine(model, 4, _SESSION_TOKENS + 2 * _MORE_TOKENS)
    generator = np.random.default_rng(0)
    second: list[float] = []
    whole: list[float] = []
    for repeat in range(repeats + 1):
        tokens = generator.integers(0, model.vocab_size, (2, _SESSION_TOKENS + _MORE_TOKENS))
        kept, fresh = f"kept{repeat}", f"fresh{repeat}"
        digest = run_request(engine, request(kept, 0, tokens[0, :_SESSION_TOKENS], 1, None))
        more = request(kept, 1, tokens[0, _SESSION_TOKENS:], 1, digest)
        times = [processor_s(engine, asked) for asked in (more, request(fresh, 0, tokens[1], 1, None))]
        if repeat:
            second.append(times[0])
            whole.append(times[1])
        engine.close(kept)
        engine.close(fresh)
    return median_ratio(second, whole)


def processor_s(engine: Engine, asked: SampleRequest) -> float:
    """Processor time of one request."""
    began = time.process_time()
    run_request(engine, asked)
    return time.process_time() - began


class _WithoutRoutes:
    """A ForwardPass that reports no routes."""

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self.load_weights, self.sample, self.logits = forward.load_weights, forward.sample, forward.logits

    def __call__(self, rows: Any) -> tuple[Tensor, Tensor]:
        hidden, routes = self._forward(rows)
        return hidden, routes[:, :0]


def disable_routes(engine: Engine) -> None:
    """Patches the engine to neither store nor return routes, for which it has no option."""
    cache, weights = engine._cache, engine._weights
    cache.routes = np.zeros((cache.num_pages, cache.routes.shape[1], 0, 0), cache.routes.dtype)
    weights.active = replace(weights.active, compute=_WithoutRoutes(weights.active.compute))


def drive(engine: Engine, sessions: list[list[dict[str, Any]]], name: str) -> float:
    """Plays sessions by calling `engine.step` without a service; returns processor time."""
    began = time.process_time()
    for number, turns in enumerate(sessions):
        engine.submit(request(f"{name}-{number}", 0, turns[0]["input"], turns[0]["output"], None))
    while engine.has_work:
        for done in engine.step():
            session, turn = done.request.session_id, int(done.request.id.split(":")[1]) + 1
            turns = sessions[int(session.rsplit("-", 1)[1])]
            if not done.is_last:
                continue
            if turn == len(turns):
                engine.close(session)
            else:
                digest = done.chunks[-1].prefix_digest
                engine.submit(request(session, turn, turns[turn]["input"], turns[turn]["output"], digest))
    return time.process_time() - began


def route_cost(scenario: Scenario, repeats: int) -> float:
    """Share of throughput lost by recording routes: the whole workload with and without, alternating."""
    model = make_model(scenario.config, scenario.vocab_size)
    times: dict[bool, list[float]] = {True: [], False: []}
    workloads = [scenario.sessions(100 + repeat) for repeat in range(repeats + 1)]
    max_tokens = max(longest_tokens(sessions) for sessions in workloads)
    engines = {kept: make_engine(model, scenario.shape.num_sessions, max_tokens) for kept in times}
    disable_routes(engines[False])
    for repeat, sessions in enumerate(workloads):
        work = as_json(sessions, scenario.vocab_size, repeat)
        order = (True, False) if repeat % 2 else (False, True)
        for kept in order:
            elapsed = drive(engines[kept], work, f"r{repeat}")
            if repeat:
                times[kept].append(elapsed)
    return 1.0 - 1.0 / median_ratio(times[True], times[False])


async def swap_figures(scenario: Scenario) -> Figures:
    """Weight updates during the workload: pause without a step, compared with the time of a step."""
    model = make_model(scenario.config, scenario.vocab_size)
    sessions = scenario.sessions(200)
    engine = Engine(model.config, model.vocab_size, len(sessions), longest_tokens(sessions), kernels="native")
    weights, work = MemoryWeights(), as_json(sessions, scenario.vocab_size, 200)
    pauses: list[float] = []

    async def update(step: int) -> None:
        manifest = weights.publish(PolicyVersion("bench", step), dict(model.named_parameters()))
        await service.stage(manifest)
        before = service.times.swap_s
        await service.activate(manifest.version)
        pauses.append(service.times.swap_s - before)

    async def play(number: int, turns: list[dict[str, Any]]) -> None:
        name, digest = f"s-{number}", None
        service.open(name)
        for turn, given in enumerate(turns):
            asked = request(name, turn, given["input"], given["output"], digest)
            async for chunk in service.stream(asked):
                digest = chunk.prefix_digest if chunk.finish is not None else digest
        service.close(name)

    async with EngineService(engine, weights.fetch, None) as service:
        await update(0)
        pauses.clear()
        load = asyncio.gather(*(play(number, turns) for number, turns in enumerate(work)))
        while len(pauses) < _SWAPS and not load.done():
            await update(len(pauses) + 1)
            await asyncio.sleep(0.05)
        await load
        steps = service.times.step_s / engine.counters.steps
    return {
        "swap_pause_ms": 1e3 * max(pauses),
        "swap_pause_median_ms": 1e3 * statistics.median(pauses),
        "swaps_under_load": float(len(pauses)),
        "engine_step_mean_ms": 1e3 * steps,
    }


def roofline_figures(scenario: Scenario, quick: bool) -> Figures:
    """Share of the roofline (memory and arithmetic), decoding 32 sessions and prefilling 512 tokens."""
    read, rate, figures = kernels.machine()
    models = {"moe": (scenario.config, scenario.vocab_size)}
    if not quick:
        models["large"] = (LARGE, 16_384)
    for name, (config, vocab_size) in models.items():
        case = kernels.Case.make(name, config, vocab_size)
        with torch.no_grad():
            figures |= kernels.engine_figures(case, read, rate)
    largest = list(models)[-1]
    figures["decode_roofline_share"] = figures[f"{largest}_decode_32_roofline_share"]
    figures["prefill_roofline_share"] = figures[f"{largest}_prefill_roofline_share"]
    return figures


def invariant_figures(scenario: Scenario) -> Figures:
    """Cost of batch invariance in the trainer; the engine's own kernels are always batch-invariant."""
    figures = kernels.trainer_figures(kernels.Case.make("moe", scenario.config, scenario.vocab_size))
    figures["batch_invariant_cost"] = figures["moe_invariant_forward_backward_cost"] - 1.0
    return figures
