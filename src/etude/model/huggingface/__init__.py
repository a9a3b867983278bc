"""Hugging Face directories in and out: `config.json` and safetensors, one file or many."""

from etude.model.huggingface.checkpoint import (
    from_huggingface,
    load_draft_layers,
    load_model,
    save_model,
    to_huggingface,
)

__all__ = ["from_huggingface", "load_draft_layers", "load_model", "save_model", "to_huggingface"]
