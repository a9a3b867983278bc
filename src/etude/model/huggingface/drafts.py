"""Adds draft layers to a model's Hugging Face directory, as DeepSeek-V3 stores them: after the last block."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from etude.errors import CheckpointError
from etude.kit.durable import move
from etude.model.drafting import DraftLayers
from etude.model.huggingface.layout import draft_entries

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DRAFTS = "model-drafts.safetensors"
_MODEL = "model-main.safetensors"


def add_draft_layers(drafts: DraftLayers, directory: Path) -> None:
    """Adds layers to a directory that `save_model` has just written: `load_draft_layers` then reads them, and
    a program that does not know them loads the model as before.

    Raises CheckpointError where the directory holds no model.
    """
    config_path = directory / "config.json"
    try:
        values = json.loads(config_path.read_text(encoding="utf-8"))
        weight_map, total = _written(directory)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"holds no model: {error}", field="directory", received=str(directory)
        ) from error
    entries = draft_entries(drafts, int(values["num_hidden_layers"]))
    tensors = {name: entry.read() for name, entry in entries.items()}
    save_file(tensors, directory / _DRAFTS, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(tensors, _DRAFTS)
    total += sum(entry.num_bytes for entry in entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    values["num_nextn_predict_layers"] = len(drafts.layers)
    config_path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _written(directory: Path) -> tuple[dict[str, str], int]:
    """The file of each of the model's tensors, and their total bytes. A single file is renamed, since readers
    prefer it to an index."""
    if not (directory / _SINGLE).exists():
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        return dict(index["weight_map"]), int(index["metadata"]["total_size"])
    path = directory / _MODEL
    move(directory / _SINGLE, path)
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    return dict.fromkeys(names, _MODEL), path.stat().st_size
