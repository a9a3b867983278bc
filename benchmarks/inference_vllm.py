"""The vLLM backend: cost of a weight update with requests in flight, and its speed against our engine's.

    python benchmarks/inference_vllm.py [--json FILE] [--repetitions 5]

Tiny models, whose time is dispatch rather than arithmetic: no figure here applies to large models.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from common import print_table, write_result
from environments import python_of

from etude.config import ModelConfig
from etude.config.engine import VllmConfig
from etude.inference import Engine, EngineService
from etude.inference.vllm import Probe, SnapshotDirectory, VllmSampler, make_vllm_sampler
from etude.model import LanguageModel, build_model
from etude.model.huggingface import save_model
from etude.protocols import Sampler
from etude.records import PolicyVersion, SampleRequest, SamplingParams, WeightManifest
from etude.weights import MemoryWeights

_VOCAB = 1024
_SESSIONS, _PROMPT, _OUTPUT = 32, 64, 128
_LONG = 400


def tiny(architecture: str, seed: int) -> LanguageModel:
    """A model of about the quickstart's size, within the limits of vLLM's kernels."""
    config = ModelConfig(architecture=cast(Any, architecture), max_positions=768)
    model = build_model(config, _VOCAB)
    model.initialise(seed)
    return model


async def sample_all(sampler: Sampler, name: str, max_tokens: int) -> float:
    """Seconds to sample all sessions concurrently."""

    async def one(number: int) -> None:
        session = f"{name}-{number}"
        sampler.open(session)
        prompt = np.random.default_rng(number).integers(0, _VOCAB, _PROMPT).astype(np.int32)
        params = SamplingParams(max_tokens=max_tokens)
        request = SampleRequest(session, session, prompt, params, frozenset(), (number,))
        async for _ in sampler.stream(request):
            pass
        sampler.close(session)

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(_SESSIONS)))
    return time.perf_counter() - began


async def measure(architecture: str, repetitions: int) -> dict[str, float]:
    """Figures of one architecture."""
    models = [tiny(architecture, seed) for seed in range(2)]
    config = VllmConfig(
        python=str(python_of("vllm")), environment=("OMP_NUM_THREADS=1", "VLLM_CPU_KVCACHE_SPACE=1")
    )
    weights = MemoryWeights()
    engine = Engine(models[0].config, _VOCAB, _SESSIONS, _PROMPT + _LONG + 2, 2048, "native", 1)
    with tempfile.TemporaryDirectory() as folder:
        root = SnapshotDirectory(Path(folder))
        manifests = [publish(root, model, step) for step, model in enumerate(models)]
        async with (
            make_vllm_sampler(config, routed=models[0].num_experts > 0, dtype="float32") as theirs,
            EngineService(engine, weights.fetch, None) as ours,
        ):
            for sink, manifest in (
                (theirs, manifests[0]),
                (ours, weights.publish(PolicyVersion("ours", 0), dict(models[0].named_parameters()))),
            ):
                await sink.stage(manifest)
                await sink.activate(manifest.version)
            return await compare(theirs, ours, manifests, repetitions)


def publish(root: SnapshotDirectory, model: LanguageModel, step: int) -> WeightManifest:
    """Publishes one version with its probe."""

    def write(directory: Path) -> None:
        save_model(model, directory)

    return root.publish(PolicyVersion("run", step), write, Probe.of(model))


async def compare(
    theirs: VllmSampler, ours: EngineService, manifests: list[WeightManifest], repetitions: int
) -> dict[str, float]:
    """Samples with both engines in turn, then measures updates with requests in flight."""
    rows: dict[str, list[float]] = {
        name: [] for name in ("vllm", "etude", "pause", "load", "step", "probe", "beyond")
    }
    total = _SESSIONS * _OUTPUT
    for sampler in (theirs, ours):
        await sample_all(sampler, "warm", 16)
    for number in range(repetitions):
        rows["vllm"].append(total / await sample_all(theirs, f"v{number}", _OUTPUT))
        rows["etude"].append(total / await sample_all(ours, f"e{number}", _OUTPUT))
    for number in range(repetitions):
        manifest = manifests[(number + 1) % 2]
        await theirs.stage(manifest)
        running = asyncio.create_task(sample_all(theirs, f"u{number}", _LONG))
        await asyncio.sleep(0.8)
        await theirs.activate(manifest.version)
        times = theirs.replica.times
        assert not running.done(), "the requests were to be in flight"
        await running
        for name in ("pause", "load", "step", "probe"):
            rows[name].append(1e3 * getattr(times, f"{name}_s"))
        rows["beyond"].append((times.pause_s - times.load_s) / times.step_s)
    median = {name: statistics.median(values) for name, values in rows.items()}
    ratio = statistics.median(a / b for a, b in zip(rows["etude"], rows["vllm"], strict=True))
    return {
        "vllm_tokens_per_s": median["vllm"],
        "etude_tokens_per_s": median["etude"],
        "etude_to_vllm_server": ratio,
        "update_pause_ms": median["pause"],
        "update_load_ms": median["load"],
        "update_step_ms": median["step"],
        "update_pause_beyond_load_steps": median["beyond"],
        "update_probe_ms": median["probe"],
    }


def main() -> None:
    """Prints tables; `--json` writes them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for architecture in ("qwen3_moe", "qwen3"):
        found = asyncio.run(measure(architecture, arguments.repetitions))
        print_table(architecture, found)
        figures |= {f"{architecture}_{name}": value for name, value in found.items()}
    if arguments.json:
        write_result(arguments.json, figures, {})


if __name__ == "__main__":
    main()
