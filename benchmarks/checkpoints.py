"""How long training is blocked by saving a checkpoint: asynchronous against synchronous writing.

    python benchmarks/checkpoints.py [--json FILE] [--rounds 5] [--width 640]

A dense model of about 80 million float32 weights with both AdamW states, about 1 GB on disk. Both kinds of
save alternate in one process, each into an empty directory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import write_result

from etude.config import CheckpointConfig, ModelConfig
from etude.model import LanguageModel
from etude.observe import MemorySink, SilentObserver
from etude.training.checkpoints import CheckpointKeeper

VOCABULARY = 32_768


def make_model(width: int) -> LanguageModel:
    """A dense model of twelve layers."""
    config = ModelConfig(
        architecture="qwen3", hidden_size=width, num_layers=12, num_heads=width // 64,
        num_kv_heads=width // 128, head_dim=64, intermediate_size=width * 3,
    )  # fmt: skip
    model = LanguageModel(config, VOCABULARY)
    model.initialise(0)
    return model


def save_once(model: LanguageModel, state: dict[str, Any], *, asynchronous: bool) -> dict[str, float]:
    """`blocked_s` and `written_s` of one save."""
    metrics, settings = MemorySink(), CheckpointConfig(asynchronous=asynchronous)
    with tempfile.TemporaryDirectory() as directory:
        with CheckpointKeeper(Path(directory) / "latest", settings, metrics, SilentObserver()) as keeper:
            keeper.save(model, state)
        return {name: float(metrics.rows[-1][name]) for name in ("blocked_s", "written_s")}


def main() -> None:
    """Runs it and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=640)
    arguments = parser.parse_args()
    model = make_model(arguments.width)
    moments = ("exp_avg", "exp_avg_sq")
    parameters = list(model.named_parameters())
    states = {name: {key: torch.zeros_like(p) for key in moments} for name, p in parameters}
    state: dict[str, Any] = {"stage": "benchmark", "step": 1, "optimizer": states}
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        for asynchronous, found in rows.items():
            found.append(save_once(model, state, asynchronous=asynchronous))
    synchronous_s, asynchronous_s = (
        statistics.median(row["blocked_s"] for row in rows[asynchronous]) for asynchronous in (False, True)
    )
    figures = {
        "blocked_s": asynchronous_s,
        "blocked_synchronous_s": synchronous_s,
        "blocked_ratio": synchronous_s / asynchronous_s,
    }
    for name, value in figures.items():
        print(f"{name:24} {value:8.2f}")
    if arguments.json:
        num_parameters = sum(p.numel() for _, p in parameters)
        write_result(
            arguments.json,
            figures,
            {"parameters": num_parameters, "rounds": {str(k): v for k, v in rows.items()}},
        )


if __name__ == "__main__":
    main()
