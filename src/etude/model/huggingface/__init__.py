"""Hugging Face directories in and out: `config.json` and safetensors, one file or many."""

from etude.model.huggingface.checkpoint import (
    check_memory,
    from_huggingface,
    load_draft_layers,
    load_model,
    outline_model,
    save_model,
    to_huggingface,
)
from etude.model.huggingface.fields import read_fields

__all__ = [
    "check_memory",
    "from_huggingface",
    "load_draft_layers",
    "load_model",
    "outline_model",
    "read_fields",
    "save_model",
    "to_huggingface",
]
