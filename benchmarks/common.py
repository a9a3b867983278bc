"""What all benchmarks share: their JSON, medians and paired ratios, and the limits of the machine."""

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
"""Far beyond any cache."""


def write_result(path: Path, figures: Mapping[str, float], peers: Mapping[str, Any]) -> None:
    """Writes figures, machine, versions and commit; `peers`: what others reached, by name."""
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
    """`write_result` of some parts of a benchmark: figures and peers of the others stay as the file has them.
    `parts` in it says when, and at which commit, each was measured."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_result(path, earlier.get("figures", {}) | dict(figures), earlier.get("peers", {}) | dict(peers))
    result = json.loads(path.read_text(encoding="utf-8"))
    now = {"commit": result["commit"], "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    result["parts"] = earlier.get("parts", {}) | dict.fromkeys(parts, now)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def print_table(title: str, rows: Mapping[str, float]) -> None:
    """One figure per line, on standard output."""
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:34s} {value:14,.4g}" if abs(value) < 100 else f"  {name:34s} {value:14,.0f}")


def put_table(document: Path, script: str, table: str) -> None:
    """Replaces what is between the two comments of a document that name the script by a table of its own."""
    begin, end = (f"<!-- benchmarks/{script}: {what} -->" for what in ("begin", "end"))
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    document.write_text(f"{before}{begin}\n{table}{end}{after}", encoding="utf-8")


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios pair by pair: each pair was measured side by side, so a slow minute cancels."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def median_figures(blocks: Sequence[Figures]) -> Figures:
    """Median of each figure over blocks that have the same figures."""
    return {name: statistics.median(block[name] for block in blocks) for name in blocks[0]}


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the machine can do at best, with the threads that are set."""

    matmul_gflops: float
    """Square float32 product of size 1,024."""
    model_matmul_gflops: float
    """The model's own products over 2,048 tokens, in one rate."""
    copy_gb_per_s: float
    """Copy of a large array: bytes read plus bytes written."""

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The least time for so much arithmetic and so much memory traffic (Williams et al. 2009)."""
        return max(flops / (self.matmul_gflops * 1e9), num_bytes / (self.copy_gb_per_s * 1e9))


def probe_roofline(config: ModelConfig, vocab_size: int, num_tokens: int = 2048) -> Roofline:
    """Measures for about a second; best of several runs, because a limit is asked for."""
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
    """Shortest of `repeats` runs, after one that warms up."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Arithmetic and traffic of one token at a given context, by the model's configuration alone."""

    forward_flops: float
    kv_read_bytes: float
    kv_write_bytes: float
    weight_bytes: float
    """The whole model: read once per step, whatever the number of tokens in it (with some batch)."""


def token_cost(config: ModelConfig, vocab_size: int, context: float, with_head: bool = True) -> TokenCost:
    """Cost of one token that sees `context` tokens. `with_head`: whether its logits are computed."""
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
    """(rows, columns) of one block's weights, one expert's, and the head's."""
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
