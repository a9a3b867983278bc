"""Models in and out: Hugging Face directories that carry all that others need to run the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.model.huggingface.checkpoint import MAX_FILE_BYTES
from etude.model.loading import AnyModel, load_any_model, save_any_model
from etude.training.checkpoints.files import DIGESTS, check_whole, write_whole

TOKENIZER = "tokenizer.json"
_COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a tokenizer. All of one directory belong together."""
_GENERATION = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert_model(
    source: Path,
    target: Path,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
    tokenizers: Sequence[Path] = (),
) -> AnyModel:
    """Reads a model with every check that reading has and writes it to `target`, whole or not at all, with
    its tokenizer, chat template and generation settings; returns it.

    `source` is a checkpoint, whose hashes are compared, or any Hugging Face directory. Its tokenizer is the
    first that lies in it or in one of `tokenizers`. What training needs to go on is left out, and so are
    layers that draft tokens. Raises CheckpointError for what cannot be read, has no tokenizer, or for a
    `target` that exists; ResourceError where the disk is full.
    """
    if target.exists():
        raise CheckpointError(
            "exists already", field="target", received=str(target), fix="name a directory that does not exist"
        )
    if (source / DIGESTS).is_file():
        check_whole(source)
    tokenizer = next((place for place in (source, *tokenizers) if (place / TOKENIZER).is_file()), None)
    if tokenizer is None:
        raise CheckpointError(
            "no tokenizer here", field=TOKENIZER, received=str(source), fix="put it beside the weights"
        )
    model = load_any_model(source, dtype)

    def fill(partial: Path) -> None:
        if isinstance(model, LanguageModel):
            save_model(model, partial, max_file_bytes)
        else:
            save_any_model(model, partial)
        for name in _COMPANIONS:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, partial / name)
        _write_generation(source, partial)

    write_whole(target, fill)
    return model


def _write_generation(source: Path, target: Path) -> None:
    """Which tokens end an answer, as the source says: there, or in its config.json."""
    if (source / _GENERATION).is_file():
        shutil.copyfile(source / _GENERATION, target / _GENERATION)
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    found = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    if found:
        (target / _GENERATION).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
