"""Difference of losses and gradients between several processes and one: the table of docs/parallelism.md.

    python benchmarks/parallelism.py [--json FILE]

Each process layout trains one batch of ragged sequences on a small mixture of experts, over gloo on this
machine, and is compared with one process that trains the same micro-batches one after the other. A gradient's
error is its largest element difference over the largest element of the same parameter's gradient.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_result

from etude.config import ModelConfig
from etude.config.parallel import ParallelConfig
from etude.model import LanguageModel
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.training.packing import pack_sequences
from etude.training.parallel import Ranks, SingleRank
from etude.training.parallel.mesh import AXES
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.training.parallel.team import Team

ARRANGEMENTS: tuple[dict[str, int], ...] = (
    {"ranks": 2},
    {"ranks": 4},
    {"ranks": 2, "fsdp": 2},
    {"ranks": 4, "fsdp": 4},
    {"ranks": 4, "fsdp": 2},
    {"ranks": 2, "expert": 2},
    {"ranks": 4, "expert": 4},
    {"ranks": 2, "context": 2},
    {"ranks": 4, "context": 4},
    {"ranks": 4, "fsdp": 2, "expert": 2},
    {"ranks": 4, "fsdp": 2, "context": 2},
    {"ranks": 4, "expert": 2, "context": 2},
    {"ranks": 2, "tensor": 2},
    {"ranks": 4, "tensor": 2},
    {"ranks": 4, "fsdp": 2, "tensor": 2},
    {"ranks": 4, "expert": 2, "tensor": 2},
    {"ranks": 4, "context": 2, "tensor": 2},
)
LENGTHS = (700, 310, 240, 150, 130, 90, 60, 40, 33, 21, 12, 7)
MAX_TOKENS = 512
VOCABULARY = 512

Answer = tuple[float, dict[str, np.ndarray]]


def make_model(seed: int) -> LanguageModel:
    """A model of two layers with eight experts each."""
    config = ModelConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8,
        experts_per_token=2, expert_size=32, max_positions=1024, initializer_range=0.1,
    )  # fmt: skip
    model = LanguageModel(config, VOCABULARY)
    model.initialise(seed)
    return model


def train_shares(model: LanguageModel, ranks: Ranks, plan: list[list[list[int]]]) -> float:
    """Accumulates this rank's gradients in the model; returns its loss."""
    total = 0.0
    for share in ranks.share(plan):
        tokens = [np.random.default_rng(i).integers(0, VOCABULARY, LENGTHS[i]) for i in share.indices]
        batch = PackedSequences.pack([one.astype(np.int32) for one in tokens])
        first = torch.zeros(len(batch.tokens), dtype=torch.bool)
        first[batch.starts] = True
        logprobs, _ = packed_logprobs(model, batch, (~first).nonzero().flatten())
        loss = -logprobs.sum() / sum(LENGTHS) * share.weight
        loss.backward()
        total += float(loss.detach())
    return total


class Probe:
    """One rank and its part of the model."""

    def __init__(self, ranks: MeshRanks) -> None:
        self.ranks = ranks
        self.model = make_model(0)
        ranks.place(self.model)

    def measure(self, plan: list[list[list[int]]]) -> Answer:
        """The whole batch's loss and gradients."""
        loss = torch.tensor([train_shares(self.model, self.ranks, plan)], dtype=torch.float64)
        self.ranks.all_reduce_(loss)
        self.ranks.reduce_gradients(self.model)
        layout = self.ranks.layout(self.model)
        gradients = {n: layout.gather(n, g) for n, g in layout.gradients().items() if g is not None}
        return float(loss), {name: gradient.numpy().copy() for name, gradient in gradients.items()}


def one_process(plan: list[list[list[int]]]) -> Answer:
    """Loss and gradients of one process on the same micro-batches: those of rank 0, then those of rank 1."""
    model = make_model(0)
    loss = train_shares(model, SingleRank(), [[batch for batches in plan for batch in batches]])
    return loss, {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def compare(sizes: dict[str, int]) -> dict[str, Any]:
    """One row of the table."""
    config = ParallelConfig(**sizes)
    data_ranks = config.ranks // (config.context * config.tensor)
    bound = sum(LENGTHS) if config.context > 1 else MAX_TOKENS
    plan = pack_sequences(LENGTHS, bound, data_ranks)
    expected_loss, expected = one_process(plan)
    team = Team.spawn(config)
    try:
        team.make(Probe)
        loss, gradients = team.call(Probe.measure, plan)
    finally:
        team.close()
    errors = {n: float(np.abs(gradients[n] - g).max() / np.abs(g).max()) for n, g in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {
        **sizes,
        "replicate": config.replicate,
        "micro_batches_per_rank": len(plan[0]),
        "loss_error": abs(loss - expected_loss) / abs(expected_loss),
        "gradient_error": errors[worst],
        "worst_parameter": worst,
    }


def main() -> None:
    """Prints the table, and writes it where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("| replicate | fsdp | expert | context | tensor | micro-batches a rank | loss | gradient |")
    print("|---|---|---|---|---|---|---|---|")
    for sizes in ARRANGEMENTS:
        row = compare(sizes)
        rows.append(row)
        axes = " | ".join(str(row.get(axis, 1)) for axis in AXES)
        figures = f"{row['loss_error']:.1e} | {row['gradient_error']:.1e}"
        print(f"| {axes} | {row['micro_batches_per_rank']} | {figures} |", flush=True)
    if arguments.json is not None:
        figures = {key: max(row[key] for row in rows) for key in ("loss_error", "gradient_error")}
        write_result(arguments.json, figures, {"arrangements": rows})


if __name__ == "__main__":
    main()
