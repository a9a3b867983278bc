"""The model that is served: its name, how text becomes its tokens, how much it may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.errors import ConfigError
from etude.inference.server.errors import NoSuchModelError
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import wrong
from etude.tokens.chat.shelf import RendererShelf
from etude.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served, and how text becomes its tokens."""

    name: str
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    """An answer ends with the first of these."""
    max_context_tokens: int
    """Prompt and answer together."""
    shelf: RendererShelf | None = None
    """Chat frames; None: the model takes completions alone."""
    default_max_tokens: int = 4096
    """Of a chat's answer, where the client names no number."""
    created_s: int = 0
    """Unix time."""

    def __post_init__(self) -> None:
        if not self.end_tokens:
            raise ConfigError("a model needs a token that ends its answers", field="end_tokens")


def check_model(body: Mapping[str, Any], model: ServedModel) -> None:
    """Raises NoSuchModelError for another model's name; BadRequestError for what is no name."""
    name = body.get("model")
    if name is None or name == model.name:
        return
    if not isinstance(name, str):
        raise wrong("model", name, "a string")
    raise NoSuchModelError(
        "no such model is served here", field="model", received=name, fix=f"ask for {model.name!r}"
    )


def room_for(num_prompt_tokens: int, model: ServedModel, field: str) -> int:
    """How many tokens an answer may have. Raises ContextLengthError if there is room for none."""
    room = model.max_context_tokens - num_prompt_tokens
    if room <= 0:
        raise ContextLengthError(num_prompt_tokens, model.max_context_tokens, field)
    return room
