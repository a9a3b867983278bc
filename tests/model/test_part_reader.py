"""Rows of parameters, read from a directory without the rest, against the model that was written there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import CheckpointError
from etude.model.huggingface import load_model, save_model
from etude.model.huggingface.part_reader import PartReader
from tests.model.builders import LATENT, PLAIN_LATENT, small_model

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "qwen3"},
    "biases": {"architecture": "qwen2"},
    "own head": {"tie_embeddings": False},
    "experts": {},
    "latent": LATENT,
    "plain latent": PLAIN_LATENT,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 3])
def test_parts_make_up_the_parameters_of_the_whole_model(shape: str, count: int, tmp_path: Path) -> None:
    save_model(small_model(0, **SHAPES[shape]), tmp_path, max_file_bytes=20_000)
    model = load_model(tmp_path, torch.bfloat16)
    with PartReader(tmp_path, torch.bfloat16) as reader:
        for name, parameter in model.named_parameters():
            step = -(-len(parameter) // count)
            parts = [
                reader.read(name, start, min(start + step, len(parameter)))
                for start in range(0, len(parameter), step)
            ]
            found = torch.cat(parts)
            assert found.dtype == parameter.dtype, name
            assert torch.equal(found, parameter), name


def test_reading_refuses_values_that_are_not_finite_where_they_are_read(tmp_path: Path) -> None:
    model = small_model(0)
    model.embedding.data[-1, 0] = torch.nan
    save_model(model, tmp_path)
    with PartReader(tmp_path, torch.float32) as reader:
        assert torch.equal(reader.read("embedding", 0, 4), model.embedding[:4])
        with pytest.raises(CheckpointError, match="not finite"):
            reader.read("embedding", 4, model.vocab_size)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    save_model(small_model(0, tie_embeddings=False), tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text(encoding="utf-8").replace(
        '"tie_word_embeddings": false', '"tie_word_embeddings": true'
    )
    config.write_text(text, encoding="utf-8")
    with PartReader(tmp_path, torch.float32) as reader, pytest.raises(CheckpointError, match="ties it"):
        reader.read("embedding", 0, 8)


def test_files_of_another_model_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    save_model(small_model(0), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_model(small_model(0, num_layers=1), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing tensors"):
        PartReader(tmp_path, torch.float32)
