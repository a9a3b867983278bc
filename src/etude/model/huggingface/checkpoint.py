"""Loads models from Hugging Face directories, and saves them as such."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import CheckpointError
from etude.model.drafting import DraftLayers
from etude.model.huggingface.fields import CheckpointFields, read_fields, write_fields
from etude.model.huggingface.files import GivenTensors, Tensors, open_tensors, write_tensors
from etude.model.huggingface.layout import Entry, draft_entries, entries
from etude.model.language_model import LanguageModel, build_model
from etude.observe.machine import total_memory_bytes

MAX_FILE_BYTES = 5_000_000_000
"""Larger checkpoints are written as several files."""
HEAD = "lm_head.weight"
"""Hugging Face's name of the output head."""
_NAMED = 4
"""Number of tensor names that an error lists."""
_CHECKED_AT_ONCE = 1 << 20
"""Values that are checked at once, which bounds the memory for it."""


def save_model(
    model: LanguageModel,
    directory: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
    drafts: DraftLayers | None = None,
) -> None:
    """Writes a directory, in the model's type, that AutoModelForCausalLM loads with equal logits.

    `drafts`: layers that `load_draft_layers` reads, and other programs ignore; they are stored as those of
    DeepSeek-V3, after the last block.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors, num_drafts = entries(model), 0
    if drafts is not None:
        tensors |= draft_entries(drafts, model.config.num_layers)
        num_drafts = len(drafts.layers)
    text = write_fields(model.config, model.vocab_size, model.embedding.dtype, num_drafts)
    (directory / "config.json").write_text(text, encoding="utf-8")
    write_tensors(directory, tensors, max_file_bytes)


@torch.no_grad()
def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Reads a directory written by `save_model` or transformers, into weights of type `dtype`.

    Ignores tensors that are no part of the model: the rotary frequencies that old versions stored, and
    layers for multi-token prediction after the last block, which `load_draft_layers` reads.

    Raises CheckpointError on a missing or damaged file, another architecture, missing, extra, wrongly
    shaped or non-finite tensors, and on a model that is larger than this machine's memory.
    """
    fields = read_fields(directory / "config.json")
    model = outline_model(fields, dtype)
    check_memory(model)  # before a file is mapped
    with open_tensors(directory, fields.fp8_block) as tensors:
        return fill_model(model, tensors, fields.num_mtp_layers)


def outline_model(fields: CheckpointFields, dtype: torch.dtype) -> LanguageModel:
    """The model that `fields` describe, without storage (on the device `meta`)."""
    with torch.device("meta"):
        return build_model(fields.config, fields.vocab_size).cast(dtype)


@torch.no_grad()
def fill_model(model: LanguageModel, tensors: Tensors, num_mtp_layers: int = 0) -> LanguageModel:
    """Allocates a model from `outline_model` and loads these weights, after checking names and shapes;
    returns it. Raises CheckpointError as `load_model` does."""
    check_names(entries(model), tensors, model.config.num_layers, num_mtp_layers)
    model.to_empty(device="cpu").reset_rotation()
    for name, target in entries(model).items():
        target.write(finite(name, tensors.read(name)))
    if model.output_embedding is None and HEAD in tensors.names():
        check_tied(tensors.read(HEAD), model.embedding)
    return model


@torch.no_grad()
def load_draft_layers(directory: Path) -> DraftLayers | None:
    """Reads the draft layers of a directory; None if it has none.

    Their copies of the embedding and of the head are not read: both are the model's.
    Raises CheckpointError as `load_model` does.
    """
    fields = read_fields(directory / "config.json")
    config, count = fields.config, fields.num_mtp_layers
    with open_tensors(directory, fields.fp8_block) as tensors:
        stored = _predicting(tensors.names(), config.num_layers, count)
        if not stored:
            return None
        drafts = DraftLayers(config, count)
        targets = draft_entries(drafts, config.num_layers)
        copies = {
            name for name in stored if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
        }
        _check(targets, tensors, tensors.names() - stored | copies)
        for name, target in targets.items():
            target.write(finite(name, tensors.read(name)))
    return drafts


def to_huggingface(model: LanguageModel) -> dict[str, Tensor]:
    """Copies of the model's tensors under Hugging Face's names and layouts."""
    return {name: entry.read() for name, entry in entries(model).items()}


@torch.no_grad()
def from_huggingface(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies Hugging Face tensors into the model. Raises CheckpointError and leaves the model unchanged."""
    given, targets = GivenTensors(tensors), entries(model)
    _check(targets, given, set())
    for name in targets:
        finite(name, tensors[name])
    for name, target in targets.items():
        target.write(tensors[name])


def check_memory(model: LanguageModel) -> None:
    """Raises CheckpointError for a model that is larger than this machine's memory."""
    needed, total = sum(p.numel() * p.element_size() for p in model.parameters()), total_memory_bytes()
    if needed > total:
        raise CheckpointError(
            f"the weights take {needed / 1e9:,.1f} GB as {str(model.embedding.dtype).removeprefix('torch.')}",
            field="memory",
            received=f"{total / 1e9:,.1f} GB on this machine",
            fix="use a machine with more memory, a smaller number format or a smaller model; "
            "`etude plan` says how much training takes",
        )


def check_names(targets: Mapping[str, Entry], tensors: Tensors, num_layers: int, num_mtp_layers: int) -> None:
    """Checks names and shapes, ignoring known tensors outside the model. Raises CheckpointError."""
    names = tensors.names()
    frequencies = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    _check(targets, tensors, _predicting(names, num_layers, num_mtp_layers) | frequencies)


def _predicting(names: set[str], num_layers: int, num_mtp_layers: int) -> set[str]:
    """The names of tensors of layers for multi-token prediction."""
    beyond = range(num_layers, num_layers + num_mtp_layers)
    layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in names}
    return {name for name, match in layers.items() if match and int(match[1]) in beyond}


def _check(targets: Mapping[str, Entry], tensors: Tensors, outside: set[str]) -> None:
    """Checks names and shapes, without the names in `outside`. Raises CheckpointError."""
    given = tensors.names() - outside
    if HEAD not in targets:
        given.discard(HEAD)
    for kind, names in (("missing", targets.keys() - given), ("extra", given - targets.keys())):
        if names:
            raise CheckpointError(
                f"{len(names)} {kind} tensors",
                field="tensors",
                received=sorted(names)[:_NAMED],
                fix="fetch the checkpoint again, or its config.json: the two do not match",
            )
    for name, target in targets.items():
        if tensors.shape(name) != target.shape:
            raise CheckpointError(
                f"must have shape {target.shape}",
                field=name,
                received=tensors.shape(name),
                fix="fetch the checkpoint again, or its config.json: the two do not match",
            )


def finite(name: str, tensor: Tensor) -> Tensor:
    """Returns `tensor`. Raises CheckpointError if it has values that are not finite."""
    if not all(bool(part.isfinite().all()) for part in tensor.reshape(-1).split(_CHECKED_AT_ONCE)):
        raise CheckpointError(
            "has values that are not finite",
            field=name,
            received="NaN or infinity",
            fix="use a checkpoint from before training diverged, or fetch it again",
        )
    return tensor


def check_tied(head: Tensor, embedding: Tensor) -> None:
    """Raises CheckpointError if a head that is stored in addition to a tied embedding differs from it."""
    if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
        raise CheckpointError(
            "differs from the embedding to which config.json ties it",
            field=HEAD,
            received=tuple(head.shape),
            fix="set tie_word_embeddings to false in config.json, if the head is to be used",
        )
