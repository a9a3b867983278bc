"""The GPU benchmark runs at small size; its figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
FIGURES = {
    "decode_dense_bandwidth_share",
    "decode_moe_bandwidth_share",
    "prefill_dense_matmul_share",
    "prefill_moe_matmul_share",
    "train_dense_mfu",
    "train_moe_mfu",
}


def test_every_stage_runs_in_small(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", str(result)]
    subprocess.run(command, check=True, env=environment, timeout=600)
    figures = json.loads(result.read_text(encoding="utf-8"))["figures"]
    assert figures.keys() >= FIGURES
    assert all(value > 0 for value in figures.values())


def test_active_parameters_of_the_models_are_what_they_are_called() -> None:
    import torch

    from etude.model import build_model
    from gpu import MIXTURE, SIZES, active_parameters  # type: ignore[import-not-found]

    with torch.device("meta"):
        sizes = {name: build_model(config, 151_936) for name, config in SIZES.items()}
        mixture = build_model(MIXTURE, 151_936)
    totals = {name: sum(p.numel() for p in model.parameters()) / 1e9 for name, model in sizes.items()}
    assert 0.9 < totals["1b"] < 1.6 and 7.5 < totals["8b"] < 8.5
    assert 3.5 < sum(p.numel() for p in mixture.parameters()) / 1e9 < 4.5
    assert 0.5 < active_parameters(mixture) / 1e9 < 0.7
