"""Weight updates: compressed size, speed of coding, and the pause of a replica that applies one.

    python benchmarks/weights.py [--json FILE] [--words 16777216] [--repeats 5] [--real-steps 10]

Fixed generator: N(0, 0.02^2) float32 masters rounded to bfloat16, AdamW (0.9, 0.95) on independent Gaussian
gradients, one step after 20 warm-up steps, at learning rates 1e-6, 3e-6 and 1e-5. The bound is the order-0
entropy of which words change, given the old exponent, plus that of the integer differences. Compared with
zstd of the full tensor, XOR and zstd-1, int32 positions and values, xdelta3 (if installed), and updates of
real runs of ours. Rates are full-model bytes per second of one core's time, with reused buffers; those
compared with XOR and zstd-1 are measured in turn with it.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from common import Figures, median_ratio, print_table, write_result
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.inference import Engine, EngineService
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.records import PolicyVersion, SampleRequest, SamplingParams
from etude.weights import (
    StoreWeights,
    Subscriber,
    WeightStore,
    apply_update,
    describe_tensors,
    encode_update,
)

RATES = {"1e_6": 1e-6, "3e_6": 3e-6, "1e_5": 1e-5}
WARM_UP_STEPS = 20
_XDELTA_WORDS = 1 << 22
_VERSION = PolicyVersion("benchmark", 0)
VOCABULARY = 4096
_MAX_TOKENS = 4096


def generate(num_words: int, learning_rate: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two versions in bfloat16, one optimiser step apart. [4096, num_words / 4096] each."""
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(num_words, generator=generator) * 0.02)
    optimizer = torch.optim.AdamW([parameter], lr=learning_rate, betas=(0.9, 0.95), fused=True)

    def step() -> Tensor:
        parameter.grad = torch.randn(num_words, generator=generator)
        optimizer.step()
        return parameter.detach().bfloat16().view(4096, -1)

    for _ in range(WARM_UP_STEPS - 1):
        step()
    return step(), step()


def entropy_bits(counts: NDArray[Any]) -> float:
    """Total entropy of the counted events in their own order-0 model."""
    used = counts[counts > 0].astype(np.float64)
    return float(-(used * np.log2(used / used.sum())).sum())


def bound_bytes(base: Tensor, target: Tensor) -> float:
    """The order-0 bound that the module docstring defines."""
    before, after = (tensor.view(torch.uint16).numpy().reshape(-1) for tensor in (base, target))
    changed = before != after
    exponents = (before >> 7) & 0xFF
    members = np.bincount(exponents, minlength=256)
    moved = np.bincount(exponents[changed], minlength=256)
    positions = sum(
        entropy_bits(np.array([part, whole - part])) for part, whole in zip(moved, members, strict=True)
    )
    differences = after[changed].astype(np.int64) - before[changed]
    return (positions + entropy_bits(np.unique(differences, return_counts=True)[1])) / 8


def median_s(work: Callable[[], Any], repeats: int) -> float:
    """Median processor time of `repeats` runs after a warm-up run."""
    return statistics.median(alternate_s({"": work}, repeats)[""])


def alternate_s(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Processor time of this thread for each, one run of each in turn after a warm-up run."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            began = time.thread_time()
            work()
            if repeat:
                times[name].append(time.thread_time() - began)
    return times


def xor_zstd(before: NDArray[Any], after: NDArray[Any], out: NDArray[Any]) -> dict[str, Callable[[], Any]]:
    """XOR and zstd-1 of [num_words] each: functions that encode, and that decode and apply. Both use existing
    buffers; a variant of the latter allocates, by zstandard's one-shot call. Nothing is verified."""
    difference = np.zeros_like(after)
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode() -> bytes:
        return compressor.compress(np.bitwise_xor(before, after, out=difference).data.cast("B"))

    packed = encode()

    def apply() -> NDArray[Any]:
        data, filled = difference.data.cast("B"), 0
        with decompressor.stream_reader(packed) as reader:
            while filled < len(data):
                filled += reader.readinto(data[filled:])
        return np.bitwise_xor(before, difference, out=out)

    def apply_fresh() -> NDArray[Any]:
        return before ^ np.frombuffer(zstandard.decompress(packed), before.dtype)

    assert np.array_equal(apply(), after) and np.array_equal(apply_fresh(), after)
    return {"xor_encode": encode, "xor_apply": apply, "xor_apply_fresh": apply_fresh}


def measure_ours(base: Tensor, target: Tensor, repeats: int) -> Figures:
    """Ratio and rates of whole updates, including manifest and checks, as in publisher and subscriber: the
    base's digest is known and the target's buffer exists. Measured in turn with XOR and zstd-1."""
    before, after = {"weight": base}, {"weight": target}
    known = describe_tensors(_VERSION, before, "").version
    named = replace(_VERSION, step=1)

    def encode(*, overwrite: bool = False) -> bytes:
        return encode_update(before, after, version=named, base_version=known, overwrite=overwrite)

    update, out = encode(), {"weight": torch.zeros_like(target)}
    works: dict[str, Callable[[], Any]] = {
        "encode": encode,
        "apply": lambda: apply_update(before, update, out=out),
        "apply_fresh": lambda: apply_update(before, update),
        **xor_zstd(*(own.view(torch.uint16).numpy().reshape(-1) for own in (base, target, out["weight"]))),
    }
    times = alternate_s(works, repeats)
    encode_s, apply_s = statistics.median(times["encode"]), statistics.median(times["apply"])
    assert torch.equal(out["weight"].view(torch.int16), target.view(torch.int16))
    bound = bound_bytes(base, target)
    return {
        "encode_vs_xor_zstd_1": median_ratio(times["xor_encode"], times["encode"]),
        "apply_vs_xor_zstd_1": median_ratio(times["xor_apply"], times["apply"]),
        "apply_vs_xor_zstd_1_in_fresh_memory": median_ratio(times["xor_apply_fresh"], times["apply_fresh"]),
        "xor_zstd_1_encode_gb_per_s_core": base.nbytes / statistics.median(times["xor_encode"]) / 1e9,
        "xor_zstd_1_apply_gb_per_s_core": base.nbytes / statistics.median(times["xor_apply"]) / 1e9,
        "ratio": base.nbytes / len(update),
        "bound_ratio": base.nbytes / bound,
        "entropy_share": bound / len(update),
        "changed_share": float((base != target).float().mean()),
        "overwrite_ratio": base.nbytes / len(encode(overwrite=True)),
        "encode_gb_per_s_core": base.nbytes / encode_s / 1e9,
        "apply_gb_per_s_core": base.nbytes / apply_s / 1e9,
    }


def measure_full(target: Tensor, repeats: int) -> Figures:
    """Ratio and rates of our full snapshot: byte planes in zstd."""
    tensors = {"weight": target}
    update, out = encode_update(None, tensors), {"weight": torch.zeros_like(target)}
    return {
        "ratio": target.nbytes / len(update),
        "encode_gb_per_s_core": target.nbytes / median_s(lambda: encode_update(None, tensors), repeats) / 1e9,
        "apply_gb_per_s_core": target.nbytes
        / median_s(lambda: apply_update(None, update, out=out), repeats)
        / 1e9,
    }


def measure_peers(base: Tensor, target: Tensor, repeats: int) -> dict[str, Figures]:
    """Ratio and encoding rate of other methods."""
    before, after = (tensor.view(torch.uint16).numpy().reshape(-1) for tensor in (base, target))

    def index_and_value() -> int:
        positions = np.flatnonzero(before != after).astype(np.int32)
        return positions.nbytes + after[positions].nbytes

    peers: dict[str, Callable[[], int]] = {
        "zstd_3_full": lambda: len(zstandard.compress(after.data.cast("B"), 3)),
        "xor_zstd_1": lambda: len(zstandard.compress((before ^ after).data.cast("B"), 1)),
        "int32_index_and_value": index_and_value,
    }
    found: dict[str, Figures] = {}
    for name, work in peers.items():
        seconds = median_s(work, repeats)
        found[name] = {"ratio": after.nbytes / work(), "encode_gb_per_s_core": after.nbytes / seconds / 1e9}
    if shutil.which("xdelta3"):
        found["xdelta3_1"] = measure_xdelta(before[:_XDELTA_WORDS], after[:_XDELTA_WORDS])
    return found


def measure_xdelta(before: NDArray[Any], after: NDArray[Any]) -> Figures:
    """Runs xdelta3 once at its fastest level, on files in a memory file system if there is one."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        paths = [Path(directory) / name for name in ("base", "target", "delta")]
        before.tofile(paths[0])
        after.tofile(paths[1])
        began = time.perf_counter()
        command = ["xdelta3", "-e", "-1", "-f", "-B", str(1 << 26), "-s", *map(str, paths)]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
        size = paths[2].stat().st_size
    return {"ratio": after.nbytes / size, "encode_gb_per_s_core": after.nbytes / seconds / 1e9}


def real_run(learning_rate: float, num_steps: int) -> Iterator[dict[str, Tensor]]:
    """Versions published by our RL trainer, in bfloat16: a small mixture of experts, groups of eight."""
    sys.path.insert(0, str(Path(__file__).parent / "training_workers"))
    from etude_rl import Loop
    from rl_task import prompts

    with tempfile.TemporaryDirectory() as directory:
        model = LanguageModel(small_mixture(256), VOCABULARY)
        model.initialise(0)
        save_model(model, Path(directory))
        asked = {
            "checkpoint": directory, "group_size": 8, "seed": 0, "completion_tokens": 48, "steps": num_steps,
            "groups": 8, "learning_rate": learning_rate, "threads": 1,
        }  # fmt: skip
        loop = Loop(asked)
    drawn = prompts(0, 8 * num_steps, VOCABULARY)
    for step in range(num_steps):
        loop.step(step, drawn[8 * step : 8 * step + 8])
        tensors = loop.weights.fetch(loop.trainer.publish())
        yield {name: tensor.bfloat16() for name, tensor in tensors.items()}


def measure_real_run(learning_rate: float, num_steps: int) -> Figures:
    """Median ratio of a real run's last updates, and the size of the model."""
    ratios: list[float] = []
    before: dict[str, Tensor] | None = None
    num_bytes = 0
    for tensors in real_run(learning_rate, num_steps):
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if before is not None:
            ratios.append(num_bytes / len(encode_update(before, tensors)))
        before = tensors
    return {"ratio": statistics.median(ratios[-4:]), "model_bytes": num_bytes}


def small_mixture(width: int) -> ModelConfig:
    """A model of four layers with eight experts each."""
    return ModelConfig(
        architecture="qwen3_moe", hidden_size=width, num_layers=4, num_heads=width // 64,
        num_kv_heads=width // 128, head_dim=64, num_experts=8, experts_per_token=2, expert_size=width,
        max_positions=_MAX_TOKENS,
    )  # fmt: skip


async def measure_swap(num_swaps: int, width: int = 512) -> Figures:
    """Weight swaps in a decoding replica: duration, and the longest step around it."""
    model = LanguageModel(small_mixture(width), VOCABULARY)
    model.initialise(0)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = Engine(model.config, VOCABULARY, 4, _MAX_TOKENS, kernels="native")
    with tempfile.TemporaryDirectory() as directory:
        subscriber = Subscriber(WeightStore.open(directory))
        publisher = StoreWeights(WeightStore.open(directory), dtype=torch.bfloat16)
        try:
            async with EngineService(engine, subscriber.fetch, None) as service:
                swaps, steps, done = await _swap_while_decoding(service, publisher, tensors, num_swaps)
        finally:
            publisher.close()
        assert subscriber.counters.deltas >= num_swaps and subscriber.counters.fallbacks == 0
    return {
        "swap_pause_ms": 1e3 * statistics.median(swaps),
        "longest_swap_pause_ms": 1e3 * max(swaps),
        "decode_step_ms": 1e3 * statistics.median(steps),
        "requests_survived": float(done),
        "model_bytes": float(sum(tensor.nbytes for tensor in tensors.values())),
    }


async def _swap_while_decoding(
    service: EngineService, publisher: StoreWeights, tensors: dict[str, Tensor], num_swaps: int
) -> tuple[list[float], list[float], int]:
    """(seconds of each swap, seconds between a session's tokens, number of its tokens)."""
    manifest = await asyncio.to_thread(publisher.publish, _VERSION, tensors)
    await service.stage(manifest)
    await service.activate(manifest.version)
    arrivals: list[float] = []
    arrived = asyncio.Event()

    async def decode() -> None:
        service.open("session")
        params = SamplingParams(max_tokens=_MAX_TOKENS - 96)
        prompt = np.arange(2, 34, dtype=np.int32)
        asked = SampleRequest("r", "session", prompt, params, frozenset(), (0,), streaming=True)
        async for _ in service.stream(asked):
            arrivals.append(time.perf_counter())
            arrived.set()

    decoding = asyncio.create_task(decode())
    swaps: list[float] = []
    generator = torch.Generator().manual_seed(0)
    for step in range(1, num_swaps + 1):
        for tensor in tensors.values():
            tensor += torch.randn(tensor.shape, generator=generator) * 1e-6
        named = replace(_VERSION, step=step)
        manifest = await asyncio.to_thread(publisher.publish, named, tensors)
        await service.stage(manifest)
        before = service.times.swap_s
        await service.activate(manifest.version)
        swaps.append(service.times.swap_s - before)
        assert not decoding.done(), "the request ended before the swaps did"
        for _ in range(3):
            arrived.clear()
            await arrived.wait()
    alive = not decoding.done()
    decoding.cancel()
    await asyncio.gather(decoding, return_exceptions=True)
    return swaps, np.diff(arrivals).tolist(), int(alive)


def main() -> None:
    """Runs it and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--words", type=int, default=1 << 24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--real-steps", type=int, default=10, help="0: the codec alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: Figures = {}
    peers: dict[str, Any] = {"words": arguments.words, "bytes": 2 * arguments.words}
    for name, rate in RATES.items():
        base, target = generate(arguments.words, rate)
        ours = measure_ours(base, target, arguments.repeats)
        others = measure_peers(base, target, arguments.repeats)
        others["etude_full"] = measure_full(target, arguments.repeats)
        peers[f"lr_{name}"] = {"etude": ours, **others}
        figures[f"ratio_at_lr_{name}"] = ours["ratio"]
        figures[f"entropy_share_at_lr_{name}"] = ours["entropy_share"]
        figures[f"ratio_vs_xor_zstd_at_lr_{name}"] = ours["ratio"] / others["xor_zstd_1"]["ratio"]
        suffix = "" if name == "1e_6" else f"_at_lr_{name}"
        figures[f"encode_gb_per_s_core{suffix}"] = ours["encode_gb_per_s_core"]
        figures[f"apply_gb_per_s_core{suffix}"] = ours["apply_gb_per_s_core"]
        print_table(f"learning rate {rate}, {2 * arguments.words / 1e6:.0f} MB of bfloat16", ours)
        for peer, values in others.items():
            print_table(peer, values)
    for figure in ("encode_vs_xor_zstd_1", "apply_vs_xor_zstd_1", "apply_vs_xor_zstd_1_in_fresh_memory"):
        figures[figure] = min(peers[f"lr_{name}"]["etude"][figure] for name in RATES)
    if arguments.real_steps:
        for name, rate in RATES.items():
            found = measure_real_run(rate, arguments.real_steps)
            peers[f"real_run_lr_{name}"] = found
            figures["ratio_real_run" if name == "3e_6" else f"ratio_real_run_at_lr_{name}"] = found["ratio"]
        swap = asyncio.run(measure_swap(5))
        peers["swap"] = swap
        figures |= {name: swap[name] for name in ("swap_pause_ms", "longest_swap_pause_ms", "decode_step_ms")}
    print_table("figures", figures)
    if arguments.json:
        write_result(arguments.json, figures, peers)


if __name__ == "__main__":
    main()
