"""Import of published models: checked, and written as a Hugging Face directory that all commands accept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.errors import CheckpointError, ConfigError
from etude.model import build_model
from etude.model.gguf_file import GgufFile
from etude.model.huggingface import save_model
from etude.model.huggingface.checkpoint import check_memory, fill_model, outline_model
from etude.model.huggingface.fields import ForeignModelError, parse_fields, read_fields
from etude.model.loading import read_architecture, read_vocab_size, read_window
from etude.tokens.chat_template import ChatTemplate
from etude.tokens.gguf_tokenizer import tokenizer_files
from etude.tokens.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from etude.training.checkpoints.exchange import convert_model
from etude.training.checkpoints.files import write_whole
from etude.training.checkpoints.token_ids import copy_token_ids


def import_model(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes `source`, a GGUF file or a Hugging Face directory, to `target` with weights of type `dtype`, its
    tokenizer, chat template, generation settings and a hash of each file; atomically.

    Everything is read and checked before anything is written. Raises CheckpointError for weights that are
    damaged, contradict their configuration or are larger than memory, and for a `target` that exists;
    ConfigError for a tokenizer that cannot be used; MissingPackageError for GGUF without the `gguf` package;
    ResourceError where the disk is full.
    """
    if target.exists():
        raise CheckpointError(
            "exists already", field="target", received=str(target), fix="name a directory that does not exist"
        )
    if not source.is_file():
        if (source / TOKENIZER_FILE).is_file():
            tokenizer = Tokenizer.load(source)
            if read_architecture(source) is not None:
                _check_tokens(tokenizer, read_vocab_size(source))
        convert_model(source, target, dtype)
        return
    opened = GgufFile(source)
    fields, files = parse_fields(opened.config()), tokenizer_files(opened.metadata)
    _check_tokens(Tokenizer(files[TOKENIZER_FILE], json.loads(files[CONFIG_FILE])), fields.vocab_size)
    model = outline_model(fields, dtype)
    check_memory(model)
    fill_model(model, opened)

    def fill(partial: Path) -> None:
        save_model(model, partial)
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        copy_token_ids(partial, partial)

    write_whole(target, fill)


def _check_tokens(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises CheckpointError where the tokenizer has tokens for which there are no weights."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens",
            field="config.json: vocab_size",
            received=vocab_size,
            fix="use the tokenizer that belongs to these weights",
        )


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The contents of a Hugging Face directory, for `etude model show`."""

    architecture: str
    """Empty if Étude does not implement it: such a model trains through transformers and samples through
    vLLM."""
    foreign: str
    """The setting that Étude does not implement, and why; empty if it implements the model."""
    parameters: int
    """Number of parameters, for an architecture that Étude implements; otherwise 0."""
    window: int
    """Longest sequence in tokens."""
    weight_bytes: int
    """Size of the weight files."""
    tokens: int
    """Size of the tokenizer's vocabulary."""
    control_tokens: int
    has_chat_template: bool
    chat_template_error: str
    """Why the chat template fails to render a plain conversation; empty if it does not fail."""


def describe_model(directory: Path) -> ModelSummary:
    """Raises CheckpointError or ConfigError for a configuration or a tokenizer that cannot be read."""
    architecture, parameters, foreign = "", 0, ""
    try:
        fields = read_fields(directory / "config.json")
    except ForeignModelError as error:
        foreign = f"{error.field} {error.received!r}: {error.message}"
    else:
        architecture = fields.config.architecture
        with torch.device("meta"):
            model = build_model(fields.config, fields.vocab_size)
        parameters = sum(parameter.numel() for parameter in model.parameters())
    tokenizer = Tokenizer.load(directory)
    return ModelSummary(
        architecture,
        foreign,
        parameters,
        read_window(directory),
        sum(file.stat().st_size for file in directory.glob("*.safetensors")),
        tokenizer.vocab_size,
        len(tokenizer.control_tokens),
        bool(tokenizer.chat_template),
        _template_error(tokenizer) if tokenizer.chat_template else "",
    )


def _template_error(tokenizer: Tokenizer) -> str:
    try:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.template_variables)
        template.render([{"role": "user", "content": "Hello"}])
    except ConfigError as error:
        return error.message
    return ""
