"""Memory of each of several ranks when loading and publishing a model: part `memory` of `your_model.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import Figures

from etude.config import ModelConfig
from etude.model import LanguageModel
from etude.model.huggingface import save_model

_WORKER = Path(__file__).parent / "training_workers" / "rank_memory.py"
_RANKS = 4
_LAYERS, _VOCABULARY = 20, 32_000
_FILE_BYTES = 500_000_000


@torch.no_grad()
def make_checkpoint(directory: Path, width: int) -> int:
    """Writes a bfloat16 model with random weights; returns their bytes."""
    config = ModelConfig(
        architecture="llama",
        hidden_size=width,
        num_layers=_LAYERS,
        num_heads=width // 64,
        num_kv_heads=width // 256,
        head_dim=64,
        intermediate_size=width * 11 // 4,
        tie_embeddings=True,
    )
    with torch.device("meta"):
        model = LanguageModel(config, _VOCABULARY).cast(torch.bfloat16)
    model.to_empty(device="cpu").reset_rotation()
    model.initialise(0)
    save_model(model, directory, _FILE_BYTES)
    return sum(parameter.nbytes for parameter in model.parameters())


def measure_memory(width: int) -> Figures:
    """Ranks over gloo shard a model of this width by FSDP: peak memory of each stage above that after
    `import torch`, over the bytes of a rank's weights."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        making = [sys.executable, __file__, root / "model", str(width)]  # its memory is not this process's
        num_bytes = int(subprocess.run(making, stdout=subprocess.PIPE, text=True, check=True).stdout)
        commands = [
            [sys.executable, _WORKER, root / "model", root, str(rank), str(_RANKS)] for rank in range(_RANKS)
        ]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        outputs = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("a rank failed, see its messages above")
    share = num_bytes / _RANKS
    figures: Figures = {"peak_model_bytes": float(num_bytes)}
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    for stage in found[0]:
        figures[f"peak_{stage}_share"] = max(peaks[stage] for peaks in found) / share
    figures["peak_bytes_per_rank_share"] = figures.pop("peak_publishing_share")
    return figures


if __name__ == "__main__":
    print(make_checkpoint(Path(sys.argv[1]), int(sys.argv[2])))
