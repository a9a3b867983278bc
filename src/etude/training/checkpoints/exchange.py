"""Export of models as Hugging Face directories with everything that other programs need to run them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from etude.config import AdapterConfig
from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.model.huggingface.checkpoint import MAX_FILE_BYTES
from etude.model.loading import AnyModel, load_any_model, save_any_model
from etude.model.lora import Adapters
from etude.training.checkpoints.files import DIGESTS, check_whole, write_whole
from etude.training.checkpoints.saving import has_checkpoint, load_checkpoint, load_state
from etude.training.checkpoints.shards import has_shards
from etude.training.checkpoints.token_ids import copy_token_ids

TOKENIZER = "tokenizer.json"
_CONFIG = "config.json"
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


def convert_model(
    source: Path,
    target: Path,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
    tokenizers: Sequence[Path] = (),
    base: Path | None = None,
) -> AnyModel:
    """Reads a model, with all checks, and writes it atomically to `target` with its tokenizer, chat template
    and generation settings; returns it.

    `source` is a checkpoint, whose hashes are compared, or any Hugging Face directory. Adapters alone are
    merged with the model in `base`, which they were trained on. The tokenizer is the first one found in
    `source`, in `base` or in one of `tokenizers`. State for resuming training and layers that draft tokens
    are left out. Raises CheckpointError for a source that cannot be read or has no tokenizer, adapters
    without their base, or for a `target` that exists; ResourceError where the disk is full.
    """
    if target.exists():
        raise CheckpointError(
            "exists already", field="target", received=str(target), fix="name a directory that does not exist"
        )
    if (source / DIGESTS).is_file():
        check_whole(source)
    if base is None and has_checkpoint(source) and not (source / _CONFIG).is_file():
        raise CheckpointError(
            "holds no model (adapters at most)",
            field="checkpoint",
            received=str(source),
            fix="give --base DIRECTORY, the model that the adapters were trained on",
        )
    places = [source, *([] if base is None else [base]), *tokenizers]
    tokenizer = next((place for place in places if (place / TOKENIZER).is_file()), None)
    if tokenizer is None:
        raise CheckpointError(
            "is missing", field=TOKENIZER, received=str(source), fix="put it beside the weights"
        )
    model = _load(source, dtype, base)

    def fill(partial: Path) -> None:
        if isinstance(model, LanguageModel):
            save_model(model, partial, max_file_bytes)
        else:
            save_any_model(model, partial)
        for name in _COMPANIONS:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, partial / name)
        copy_token_ids(next(place for place in (tokenizer, *places) if (place / _CONFIG).is_file()), partial)

    write_whole(target, fill)
    return model


def _load(source: Path, dtype: torch.dtype, base: Path | None) -> AnyModel:
    """The model in `source`, whichever program wrote it; of adapters, `base` merged with them."""
    if not (source / _CONFIG).is_file() and base is not None:
        return _cast(_merged(source, load_state(source) or {}, base), dtype)
    if has_shards(source):
        return _cast(load_checkpoint(source)[0], dtype)
    return load_any_model(source, dtype)


def _merged(source: Path, state: Mapping[str, Any], base: Path) -> AnyModel:
    """The model in `base` with the adapters in `state` merged into it."""
    if "adapters" not in state:
        raise CheckpointError("holds neither a model nor adapters", field="checkpoint", received=str(source))
    stored = state["adapters"]
    for dtype in (torch.float32, torch.bfloat16):  # a base is the same only as training had it
        model = load_any_model(base, dtype)
        adapters = Adapters(model, AdapterConfig.model_validate(stored["config"]))
        if adapters.base_digest == stored["base"]:
            adapters.load_state(stored)
            adapters.merge()
            return model
    raise CheckpointError(
        "is not the model that the adapters were trained on",
        field="base",
        received=str(base),
        fix="give --base DIRECTORY, the initial checkpoint of the run that trained them",
    )


def _cast(model: AnyModel, dtype: torch.dtype) -> AnyModel:
    return model.cast(dtype) if isinstance(model, LanguageModel) else model.to(dtype)
