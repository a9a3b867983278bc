"""Shared by all benchmarks: result files, medians and paired ratios, and the machine's roofline."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.config import ModelConfig
from etude.observe import commit, describe_machine, versions

Figures = dict[str, float]

_FLOAT_BYTES = 4
_COPY_BYTES = 256 << 20
"""Larger than any cache."""


def write_result(path: Path, figures: Mapping[str, float], peers: Mapping[str, Any]) -> None:
    """Writes figures, machine, versions and commit; `peers`: further results by name."""
    result = {
        "figures": dict(figures),
        "peers": dict(peers),
        "machine": {**describe_machine(), "compute_threads": torch.get_num_threads()},
        "versions": versions(),
        "commit": commit(),
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def merge_result(
    path: Path, parts: Sequence[str], figures: Mapping[str, float], peers: Mapping[str, Any]
) -> None:
    """`write_result` for some parts of a benchmark: figures and peers of the other parts stay in the file.
    `parts` in it has time, commit and processor of each part's measurement."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_result(path, earlier.get("figures", {}) | dict(figures), earlier.get("peers", {}) | dict(peers))
    result = json.loads(path.read_text(encoding="utf-8"))
    now = {"commit": result["commit"], "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    now["cpu"] = result["machine"]["cpu"]
    result["parts"] = earlier.get("parts", {}) | dict.fromkeys(parts, now)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def print_table(title: str, rows: Mapping[str, float]) -> None:
    """Prints one figure per line."""
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:34s} {value:14,.4g}" if abs(value) < 100 else f"  {name:34s} {value:14,.0f}")


def put_table(document: Path, script: str, table: str) -> None:
    """Replaces the text between the two comments in a document that name the script by its table."""
    begin, end = (f"<!-- benchmarks/{script}: {what} -->" for what in ("begin", "end"))
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    document.write_text(f"{before}{begin}\n{table}{end}{after}", encoding="utf-8")


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the pairwise ratios: pairs are measured side by side, so other load cancels out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def median_figures(blocks: Sequence[Figures]) -> Figures:
    """Median of each figure over blocks with the same figures."""
    return {name: statistics.median(block[name] for block in blocks) for name in blocks[0]}


@dataclass(frozen=True, slots=True)
class Roofline:
    """The machine's measured limits with the current number of threads."""

    matmul_gflops: float
    """Square float32 product of size 1,024."""
    model_matmul_gflops: float
    """Rate over all of the model's own products for 2,048 tokens."""
    copy_gb_per_s: float
    """Copy of a large array: bytes read plus bytes written."""

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Lower bound of the time for this arithmetic and memory traffic (Williams et al. 2009)."""
        return max(flops / (self.matmul_gflops * 1e9), num_bytes / (self.copy_gb_per_s * 1e9))


def probe_roofline(config: ModelConfig, vocab_size: int, num_tokens: int = 2048) -> Roofline:
    """Measures for about a second; takes the best of several runs, since these are limits."""
    square = torch.randn(1024, 1024)
    square_s = best_time_s(lambda: square @ square)
    pairs = [
        (torch.randn(num_tokens, rows), torch.randn(rows, columns))
        for rows, columns in _product_shapes(config, vocab_size)
    ]
    model_flops = sum(2.0 * left.numel() * right.shape[1] for left, right in pairs)
    model_s = best_time_s(lambda: [left @ right for left, right in pairs])
    source = torch.ones(_COPY_BYTES // _FLOAT_BYTES)
    target = torch.empty_like(source)
    copy_s = best_time_s(lambda: target.copy_(source), repeats=4)
    return Roofline(2 * 1024**3 / square_s / 1e9, model_flops / model_s / 1e9, 2 * _COPY_BYTES / copy_s / 1e9)


def best_time_s(work: Callable[[], Tensor | list[Tensor]], repeats: int = 12) -> float:
    """Shortest of `repeats` runs after a warm-up run."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Arithmetic and memory traffic of one token with a given context, from the configuration alone."""

    forward_flops: float
    kv_read_bytes: float
    kv_write_bytes: float
    weight_bytes: float
    """Bytes of the whole model, read once per step whatever its number of tokens (given some batch)."""


def token_cost(config: ModelConfig, vocab_size: int, context: float, with_head: bool = True) -> TokenCost:
    """Cost of one token that attends to `context` tokens. `with_head`: whether its logits are computed."""
    width, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    kv_width = config.num_kv_heads * dim
    attention = width * (heads * dim + 2 * kv_width) + heads * dim * width
    expert = 3 * width * config.expert_size
    router = width * config.num_experts
    head = vocab_size * width
    active = config.num_layers * (attention + router + config.experts_per_token * expert)
    stored = config.num_layers * (attention + router + config.num_experts * expert) + head
    scores = config.num_layers * 2 * heads * dim * context
    return TokenCost(
        forward_flops=2.0 * (active + scores + (head if with_head else 0)),
        kv_read_bytes=float(_FLOAT_BYTES * config.num_layers * 2 * kv_width * context),
        kv_write_bytes=float(_FLOAT_BYTES * config.num_layers * 2 * kv_width),
        weight_bytes=float(_FLOAT_BYTES * stored),
    )


def _product_shapes(config: ModelConfig, vocab_size: int) -> list[tuple[int, int]]:
    """(rows, columns) of the weights of one block, one expert and the head."""
    width, inner = config.hidden_size, config.expert_size
    heads_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    return [
        (width, heads_width + 2 * kv_width),
        (heads_width, width),
        (width, 2 * inner),
        (inner, width),
        (width, vocab_size),
    ]
