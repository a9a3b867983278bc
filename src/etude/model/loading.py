"""Loads models of any architecture: with our own implementation if there is one, otherwise transformers'."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.config import ModelConfig
from etude.errors import CheckpointError
from etude.model.drafting import DraftLayers
from etude.model.huggingface import load_model, save_model
from etude.model.huggingface.fields import ForeignModelError, read_fields
from etude.model.language_model import LanguageModel
from etude.model.transformers_model import TransformersModel

AnyModel = LanguageModel | TransformersModel


def load_any_model(directory: Path, dtype: torch.dtype = torch.float32) -> AnyModel:
    """Loads a LanguageModel if we implement the architecture, otherwise a TransformersModel. Raises
    CheckpointError."""
    if read_architecture(directory) is None:
        return TransformersModel.load(directory, dtype)
    return load_model(directory, dtype)


def save_any_model(model: AnyModel, directory: Path, drafts: DraftLayers | None = None) -> None:
    """Writes a Hugging Face directory that transformers, vLLM and `load_any_model` read. `drafts`: see
    `save_model`."""
    if isinstance(model, TransformersModel):
        model.save(directory)
    else:
        save_model(model, directory, drafts=drafts)


def read_architecture(directory: Path) -> ModelConfig | None:
    """Configuration of a model that we implement; None for another architecture. Raises CheckpointError."""
    try:
        return read_fields(directory / "config.json").config
    except ForeignModelError:
        return None


def read_vocab_size(directory: Path) -> int:
    """Embedding rows of a model that we implement, which may be more than its tokenizer has tokens. Raises
    CheckpointError."""
    return read_fields(directory / "config.json").vocab_size


def read_window(directory: Path) -> int:
    """Longest sequence, in tokens, of the model in a Hugging Face directory. Raises CheckpointError."""
    own = read_architecture(directory)
    if own is not None:
        return own.max_positions
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        return int(config.get_text_config().max_position_embeddings)
    except Exception as error:  # anything that it raises for unexpected fields
        raise CheckpointError(
            f"names no maximum length that transformers understands: {error}",
            field="config.json",
            received=str(directory),
            fix="use a causal language model that this version of transformers knows",
        ) from error
