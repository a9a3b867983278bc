"""The fields that chat completions and completions share: read, checked, and none passed over in silence.

Every field is obeyed, changes nothing by its nature (`user`), or is refused by name unless its value asks for
nothing. A field that is not known at all is refused as well: it may have been meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from etude.errors import ConfigError
from etude.inference.server.errors import NoSuchModelError
from etude.records import SamplingParams
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import flag, integer, number, stop_strings, unsupported, wrong
from etude.tokens.chat.shelf import RendererShelf
from etude.tokens.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 128
_NAME_CHARACTERS = 64
"""Of a field's name that is compared with those that there are."""
_MAX_TEMPERATURE = 2.0

SHARED_FIELDS = frozenset(
    ("model", "stream", "stream_options", "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p")
)
HARMLESS_FIELDS = frozenset(("user", "metadata", "safety_identifier", "prompt_cache_key"))
"""Say something of the request, and nothing of the answer."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
}


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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the answers to one request are drawn and returned."""

    params: SamplingParams
    """`max_tokens` is not yet cut to the context's room."""
    num_samples: int
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool

    def params_within(self, max_tokens: int) -> SamplingParams:
        """The parameters with the room that the context leaves."""
        return replace(self.params, max_tokens=max_tokens)


def check_fields(body: Mapping[str, Any], known: Set[str], neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raises BadRequestError for a field that is not supported, or not known."""
    refused = {**_NEUTRAL, **neutral}
    for name, value in body.items():
        if name in known or name in HARMLESS_FIELDS or value is None:
            continue
        if name in refused:
            if not any(_same(value, one) for one in refused[name]):
                raise unsupported(name, value, "is not supported here")
            continue
        close = difflib.get_close_matches(name[:_NAME_CHARACTERS], [*known, *refused], 1)
        fix = f"did you mean {close[0]}?" if close else "leave it out"
        raise unsupported(name, value, "there is no such field", fix)


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


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


def read_sampling(body: Mapping[str, Any], max_tokens: int, logprobs: bool, num_top: int) -> Sampling:
    """Reads what both endpoints have in common. Raises BadRequestError."""
    options = body.get("stream_options")
    stream = flag(body, "stream", False)
    if options is not None and not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if options is not None and not stream:
        raise unsupported("stream_options", "an object", "is for streams alone", "send stream: true with it")
    for name, value in (options or {}).items():
        if name != "include_usage" and not (name == "include_obfuscation" and value is False):
            raise unsupported(f"stream_options.{name}", value, "is not supported here")
    samples = integer(body, "n", 1, MAX_SAMPLES)
    return Sampling(
        params=SamplingParams(
            temperature=number(body, "temperature", 1.0, 0.0, _MAX_TEMPERATURE),
            top_p=_top_p(body),
            top_k=max(_whole(body, "top_k", -1), 0),
            min_p=_min_p(body),
            max_tokens=max_tokens,
            raw_logprobs=flag(body, "raw_logprobs", False),
            top_logprobs=num_top,
        ),
        num_samples=samples or 1,
        seed=integer(body, "seed", 0),
        stops=stop_strings(body.get("stop"), "stop"),
        stream=stream,
        include_usage=flag(options or {}, "include_usage", False),
        logprobs=logprobs,
    )


def room_for(num_prompt_tokens: int, wanted: int, model: ServedModel, field: str) -> int:
    """How many tokens an answer may have. Raises ContextLengthError if there is room for none."""
    room = model.max_context_tokens - num_prompt_tokens
    if room <= 0:
        raise ContextLengthError(num_prompt_tokens, model.max_context_tokens, field)
    return min(wanted, room)


def _whole(body: Mapping[str, Any], field: str, low: int) -> int:
    return integer(body, field, low, 1 << 31) or 0


def _top_p(body: Mapping[str, Any]) -> float:
    value = number(body, "top_p", 1.0, 0.0, 1.0)
    if value == 0.0:
        raise wrong("top_p", value, "a number above 0, up to 1")
    return value


def _min_p(body: Mapping[str, Any]) -> float:
    value = number(body, "min_p", 0.0, 0.0, 1.0)
    if value == 1.0:
        raise wrong("min_p", value, "a number from 0 on, below 1")
    return value
