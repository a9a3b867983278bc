"""Share of the GPU's measured limits that the GPU path reaches, with random bfloat16 weights.

    python benchmarks/gpu.py [--size 1b|8b] [--only decode|prefill|train ...] [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --tiny      on a CPU: tests that it runs, no figures

Limits are measured in the same process: the rate of a large copy (bytes read and written), and of a large
matrix product.

    decode    engine steps of 32 sessions at 960 tokens: bytes of weights, keys and values that a step must
              read, over time, as a share of the copy's rate; for a mixture only the experts that were chosen
    prefill   one forward pass over a prompt of 8,192 tokens: operations of all products, and of attention to
              what is not masked, over time, as a share of the product's rate
    train     forward, backward and optimiser step on 8,192 packed tokens: three times the operations of the
              forward pass, over time, as a share of the product's rate (MFU); dense of about 1B parameters,
              and a mixture of about 4B of which 0.6B are active

Needs PyTorch, Triton, transformers, and the small packages that the core imports.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from etude.config import ModelConfig, OptimizerConfig
from etude.inference.cache import PAGE_TOKENS, PagedCache, StepRows
from etude.inference.engine import Engine
from etude.inference.gpu import GpuForward
from etude.model import LanguageModel, build_model
from etude.model.kernels.gpu.ops import GpuOps
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.records import PolicyVersion, SampleRequest, SamplingParams
from etude.training.optimizer import Optimizer

STAGES = ("decode", "prefill", "train")


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the workload."""

    sessions: int
    vocab_size: int
    context: int
    decode_steps: int
    prompt: int
    train_lengths: tuple[int, ...]
    repeats: int
    copy_bytes: int
    matmul_size: int


FULL = Scale(32, 151_936, 960, 48, 8192, (2048, 1536, 1536, 1024, 1024, 512, 512), 10, 2 << 30, 8192)
TINY = Scale(3, 64, 20, 2, 40, (24, 16, 8), 1, 1 << 20, 64)


def dense(hidden: int, layers: int, heads: int, inner: int, tied: bool) -> ModelConfig:
    """A dense model of the Qwen3 family: heads of width 128, eight key-value heads."""
    return ModelConfig(
        architecture="qwen3",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=inner,
        tie_embeddings=tied,
        max_positions=16384,
    )


SIZES = {"1b": dense(2048, 16, 16, 6144, tied=True), "8b": dense(4096, 36, 32, 12288, tied=False)}
MIXTURE = ModelConfig(
    architecture="qwen3_moe",
    hidden_size=1536,
    num_layers=20,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    num_experts=64,
    experts_per_token=4,
    expert_size=640,
    tie_embeddings=True,
    max_positions=16384,
)
TINY_DENSE = ModelConfig(
    architecture="qwen3",
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    max_positions=128,
)
TINY_MIXTURE = TINY_DENSE.model_copy(
    update={
        "architecture": "qwen3_moe",
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_size": 16,
    }
)


def synchronise() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_s(compute: Callable[[], object], repeats: int, warm: int = 3) -> float:
    """Median seconds of one call with the device otherwise idle."""
    times: list[float] = []
    for number in range(warm + repeats):
        synchronise()
        began = time.perf_counter()
        compute()
        synchronise()
        if number >= warm:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Bench:
    """Device, number format and scale, with the device's measured limits."""

    device: str
    dtype: torch.dtype
    scale: Scale
    copy_bytes_per_s: float
    matmul_flops: float

    @staticmethod
    def measured(device: str, dtype: torch.dtype, scale: Scale) -> Bench:
        """Measures the device's limits."""
        source = torch.zeros(scale.copy_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_s = median_s(lambda: target.copy_(source), scale.repeats)
        size = scale.matmul_size
        square = torch.randn((size, size), device=device).to(dtype)
        matmul_s = median_s(lambda: square @ square, scale.repeats)
        return Bench(device, dtype, scale, 2.0 * scale.copy_bytes / copy_s, 2.0 * size**3 / matmul_s)


def build(config: ModelConfig, bench: Bench) -> LanguageModel:
    """A model with random weights on the device."""
    with torch.device(bench.device):
        model = build_model(config, bench.scale.vocab_size).cast(bench.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    model.ops = GpuOps()
    return model


def active_parameters(model: LanguageModel) -> float:
    """Number of weights used per token, including the output head and only the chosen experts."""
    config = model.config
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is model.embedding and not config.tie_embeddings:
            continue
        is_expert = parameter.ndim == 3 and ".experts." in name
        total += parameter.numel() * (config.experts_per_token / config.num_experts if is_expert else 1.0)
    return total


def attention_operations(config: ModelConfig, lengths: tuple[int, ...]) -> float:
    """Operations of attention scores and weighted values, without masked positions."""
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 4.0 * pairs * config.num_layers * config.num_heads * config.head_dim


def decode(config: ModelConfig, bench: Bench) -> dict[str, float]:
    """Figures of engine steps in which every session samples one token."""
    scale, model = bench.scale, build(config, bench)
    longest = scale.context + scale.decode_steps + 8
    number = "bfloat16" if bench.dtype == torch.bfloat16 else "float32"
    engine = Engine(
        config,
        scale.vocab_size,
        scale.sessions,
        longest,
        prefill_tokens=scale.prompt,
        kernels="gpu",
        native_weights=number,
        device=bench.device,
    )
    version = PolicyVersion("random", 0)
    engine.stage(version, dict(model.named_parameters()))
    engine.activate(version)
    source = np.random.default_rng(0)
    for session in range(scale.sessions):
        tokens = source.integers(0, scale.vocab_size, scale.context).astype(np.int32)
        params = SamplingParams(max_tokens=scale.decode_steps + 6)
        engine.submit(
            SampleRequest(
                id=f"r{session}",
                session_id=f"s{session}",
                suffix=tokens,
                params=params,
                stop_tokens=frozenset(),
                rng_key=(session,),
                prefix_digest=None,
            )
        )
    while engine.counters.prefill_tokens < scale.sessions * scale.context:
        engine.step()
    step_s = median_s(engine.step, scale.decode_steps, warm=2)
    size = torch.finfo(bench.dtype).bits / 8
    cached = config.cache_heads * (config.key_dim + config.value_dim) * config.num_layers
    keys = scale.sessions * (scale.context + scale.decode_steps / 2) * cached * size
    read = weight_bytes(model, chosen_share(config, engine)) + keys
    return {
        "step_s": step_s,
        "tokens_per_s": scale.sessions / step_s,
        "bandwidth_share": read / step_s / bench.copy_bytes_per_s,
    }


def chosen_share(config: ModelConfig, engine: Engine) -> float:
    """Expected share of the experts that a step of all sessions reads, for random routes."""
    if not config.num_moe_layers:
        return 1.0
    running = max(1, engine.num_running)
    return 1.0 - (1.0 - config.experts_per_token / config.num_experts) ** running


def weight_bytes(model: LanguageModel, expert_share: float) -> float:
    """Bytes of weights that a step reads; of an embedding not tied to the head only a few rows count."""
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is model.embedding and not model.config.tie_embeddings:
            continue
        is_expert = parameter.ndim == 3 and ".experts." in name
        total += parameter.numel() * parameter.element_size() * (expert_share if is_expert else 1.0)
    return total


def prefill(config: ModelConfig, bench: Bench) -> dict[str, float]:
    """Figures of one forward pass over a prompt, with the logits of its last token."""
    model, length = build(config, bench), bench.scale.prompt
    num_pages = -(-length // PAGE_TOKENS)
    cache = PagedCache(config, num_pages, torch.device(bench.device), bench.dtype)
    forward = GpuForward(model, cache)
    tokens = np.random.default_rng(0).integers(0, bench.scale.vocab_size, length)
    tables = np.arange(num_pages, dtype=np.int32)[None]
    rows = StepRows.plan(tokens, tables, np.array([length]), np.array([0]))

    def compute() -> Tensor:
        return forward.logits(forward(rows)[0][-1:])

    pass_s = median_s(compute, bench.scale.repeats)
    inner = active_parameters(model) - model.head.numel()
    operations = 2.0 * inner * length + attention_operations(config, (length,))
    return {"pass_s": pass_s, "matmul_share": operations / pass_s / bench.matmul_flops}


def train(config: ModelConfig, bench: Bench) -> dict[str, float]:
    """Figures of training steps on packed sequences."""
    model, lengths = build(config, bench), bench.scale.train_lengths
    optimizer = Optimizer(model, OptimizerConfig(matrix_optimizer="adamw"), 100)
    source = np.random.default_rng(0)
    sequences = [source.integers(0, bench.scale.vocab_size, n).astype(np.int32) for n in lengths]
    batch = PackedSequences.pack(sequences, bench.device)
    is_first = np.zeros(sum(lengths), dtype=np.bool_)
    is_first[batch.starts] = True
    targets = torch.from_numpy(np.flatnonzero(~is_first)).to(bench.device)

    def accumulate() -> None:
        logprobs, _ = packed_logprobs(model, batch, targets)
        (-logprobs.mean()).backward()

    def step() -> None:
        accumulate()
        optimizer.step()

    step_s = median_s(step, bench.scale.repeats)
    gradient_s = median_s(accumulate, bench.scale.repeats, warm=1)
    forward = 2.0 * active_parameters(model) * sum(lengths) + attention_operations(config, lengths)
    return {
        "step_s": step_s,
        "gradient_s": gradient_s,
        "tokens_per_s": sum(lengths) / step_s,
        "mfu": 3.0 * forward / step_s / bench.matmul_flops,
        "gradient_mfu": 3.0 * forward / gradient_s / bench.matmul_flops,
    }


def run(
    bench: Bench, stages: tuple[str, ...], sampled: ModelConfig, trained: ModelConfig, mixture: ModelConfig
) -> dict[str, float]:
    """All figures of the stages, by name."""
    cases = {
        "decode": (("decode_dense", decode, sampled), ("decode_moe", decode, mixture)),
        "prefill": (("prefill_dense", prefill, sampled), ("prefill_moe", prefill, mixture)),
        "train": (("train_dense", train, trained), ("train_moe", train, mixture)),
    }
    figures = {
        "copy_gb_per_s": bench.copy_bytes_per_s / 1e9,
        "matmul_tflops": bench.matmul_flops / 1e12,
    }
    for name, compute, config in (case for stage in stages for case in cases[stage]):
        found = compute(config, bench)
        figures |= {f"{name}_{key}": value for key, value in found.items()}
        print_figures(name, found)
        gc.collect()  # engines are in reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return figures


def print_figures(name: str, figures: Mapping[str, float]) -> None:
    print(name, *(f"{key}={value:.4g}" for key, value in figures.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="8b", help="model of decode and prefill")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stages = tuple(stage for stage in STAGES if stage in options.only)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.tiny:
        bench = Bench.measured(device, torch.float32, TINY)
        models = TINY_DENSE, TINY_DENSE, TINY_MIXTURE
    else:
        bench = Bench.measured(device, torch.bfloat16, FULL)
        models = SIZES[options.size], SIZES["1b"], MIXTURE
    figures = run(bench, stages, *models)
    if options.json is not None:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        result = {"figures": figures, "device": name, "torch": torch.__version__}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
