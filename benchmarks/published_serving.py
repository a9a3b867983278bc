"""Sampling speed of a published model against peers with the same float32 weights and number of threads: part
`serving` of `your_model.py`. Workload, rounds and peers are those of `inference.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load import LogNormal, WorkloadShape
from common import Figures
from inference_work import Scenario

from etude.model.huggingface import read_fields
from etude.training.checkpoints.importing import import_model
from inference import PeerComparison, peer_results

PEERS = {1: "llama_cpp", 16: "vllm"}
"""Number of concurrent sessions -> peer."""
_CHOICES = {
    "ours": "2 threads, on a schedule",
    "llama_cpp": "2 threads, one cache",
    "vllm": "2 threads, compiled",
}
_SECONDS_PER_TURN = 300.0


def measure_serving(gguf: Path, rounds: int, at_once: Sequence[int]) -> tuple[Figures, dict[str, Any]]:
    """(our tokens per second over each peer's, all rounds). `at_once`: numbers of concurrent sessions, each
    with its peer.

    Sessions have three turns: a prompt of 200 to 600 tokens, answers of 48 and tool results of 20 to 200.
    """
    figures: Figures = {}
    comparisons: dict[str, PeerComparison] = {}
    with tempfile.TemporaryDirectory(prefix="etude-serving-") as folder:
        model = Path(folder) / "model"
        import_model(gguf, model)
        fields = read_fields(model / "config.json")
        for num_sessions in at_once:
            peer = PEERS[num_sessions]
            shape = WorkloadShape(
                num_sessions=num_sessions,
                turns=LogNormal(3, 3),
                prompt_tokens=(200, 600),
                output_tokens=LogNormal(48, 48),
            )
            name = f"smollm2_{num_sessions}"
            scenario = Scenario(
                name, fields.config, fields.vocab_size, shape, _SECONDS_PER_TURN, checkpoint=model
            )
            place = Path(folder) / name
            place.mkdir()
            comparison = comparisons[name] = PeerComparison(scenario, place, rounds, None)
            comparison.run(["ours", peer], _CHOICES)
            ratios = comparison.ratios(peer)
            if ratios is not None:
                figures[f"serve_vs_{peer}_{num_sessions}"] = ratios[0]
    return figures, peer_results(comparisons)
