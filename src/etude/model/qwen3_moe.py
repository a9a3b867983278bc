"""The name under which callers knew the model when it had one architecture."""

from __future__ import annotations

from etude.model.blocks import Block
from etude.model.feed_forward import Experts, RouterStatistics
from etude.model.language_model import LanguageModel as Qwen3Moe

__all__ = ["Block", "Experts", "Qwen3Moe", "RouterStatistics"]
