"""The common form of requests of all dialects, and the fields that several dialects share.

Every field is obeyed, has no effect by nature (`user`), or is refused by name unless its value is neutral.
With `strict`, an unknown field is refused as well: it may be a misspelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from etude.records import SamplingParams
from etude.tokens.chat.fields import flag, integer, number, unsupported, wrong
from etude.tokens.chat.messages import Message
from etude.tokens.chat.reader import ReadingRules

MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 128
_NAME_CHARACTERS = 64
"""Characters of an unknown field's name that are compared with known ones."""

Neutral = Mapping[str, tuple[object, ...]]
"""Unsupported fields, with the values that have no effect."""

DRAWING_FIELDS = frozenset(("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed"))
SHARED_FIELDS = DRAWING_FIELDS | {"stream_options", "n", "stop"}
_HARMLESS_FIELDS = frozenset(("user", "metadata", "safety_identifier", "prompt_cache_key", "client_metadata"))
"""Describe the request and have no effect on the answer."""
_HINTS = frozenset(("reasoning_effort", "verbosity", "thinking"))
"""Ask for more or less thinking or text. Coding agents always send them; they are ignored here."""
_HINT_OPTIONS = frozenset(("verbosity", "effort", "summary"))
"""The same, in objects such as `reasoning`."""
_NEUTRAL: Neutral = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
_NEUTRAL_STRICT: Neutral = {
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
}
"""Refused only with `strict`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one request."""

    params: SamplingParams
    """Without `max_tokens`: see `params_within`."""
    max_tokens: int | None
    """Per answer; None: the client set no limit."""
    num_samples: int = 1
    seed: int | None = None
    logprobs: bool = False

    def params_within(self, room: int, default: int) -> SamplingParams:
        """The parameters, limited to the room left in the context. `default`: if the client set no limit."""
        return replace(self.params, max_tokens=min(room, self.max_tokens or default))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for the next answer of a conversation."""

    messages: tuple[Message, ...]
    """The opening first."""
    rules: ReadingRules
    sampling: Sampling
    stream: bool = False
    include_usage: bool = False
    """Whether a stream of chat completions ends with usage."""
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The original body: some dialects echo parts of it."""

    @property
    def num_answers(self) -> int:
        """Number of answers requested."""
        return self.sampling.num_samples

    @property
    def model(self) -> str:
        """The requested model name; empty: none."""
        return str(self.body.get("model") or "")


def check_fields(body: Mapping[str, Any], known: Set[str], neutral: Neutral, strict: bool = True) -> None:
    """Raises BadRequestError for an unsupported field; with `strict` also for an unknown one."""
    refused = {**_NEUTRAL, **neutral, **(_NEUTRAL_STRICT if strict else {})}
    for name, value in body.items():
        if name in known or name in _HARMLESS_FIELDS or name in _HINTS or value is None:
            continue
        if name in refused:
            if not any(_same(value, allowed) for allowed in refused[name]):
                raise unsupported(name, value, "is not supported here")
        elif strict:
            close = difflib.get_close_matches(name[:_NAME_CHARACTERS], [*known, *refused], 1)
            fix = f"did you mean {close[0]}?" if close else "leave it out"
            raise unsupported(name, value, "there is no such field", fix)


def check_options(body: Mapping[str, Any], name: str, refused: Sequence[str], strict: bool) -> None:
    """Raises BadRequestError for a `refused` option of object `name`; with `strict` for any but a hint."""
    options = body.get(name) or {}
    if not isinstance(options, dict):
        raise wrong(name, options, "an object")
    for option, value in options.items():
        is_refused = option in refused or (strict and option not in _HINT_OPTIONS)
        if is_refused and value not in (None, {"type": "text"}):
            raise unsupported(f"{name}.{option}", value, "is not supported here")


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def read_sampling(
    body: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: bool = False,
    num_top: int = 0,
    max_temperature: float = 2.0,
) -> Sampling:
    """Reads the sampling options. Raises BadRequestError."""
    top_p, min_p = number(body, "top_p", 1.0, 0.0, 1.0), number(body, "min_p", 0.0, 0.0, 1.0)
    if top_p == 0.0:
        raise wrong("top_p", top_p, "a number above 0, up to 1")
    if min_p == 1.0:
        raise wrong("min_p", min_p, "a number from 0 on, below 1")
    return Sampling(
        params=SamplingParams(
            temperature=number(body, "temperature", 1.0, 0.0, max_temperature),
            top_p=top_p,
            top_k=max(integer(body, "top_k", -1, 1 << 31) or 0, 0),
            min_p=min_p,
            raw_logprobs=flag(body, "raw_logprobs", False),
            top_logprobs=num_top,
        ),
        max_tokens=max_tokens,
        num_samples=integer(body, "n", 1, MAX_SAMPLES) or 1,
        seed=integer(body, "seed", 0),
        logprobs=logprobs,
    )


def read_stream(body: Mapping[str, Any], strict: bool = True) -> tuple[bool, bool]:
    """(whether to stream the answer, whether the stream ends with usage). Raises BadRequestError."""
    options = body.get("stream_options")
    stream = flag(body, "stream", False)
    if options is not None and not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if strict and options is not None and not stream:
        raise unsupported("stream_options", "an object", "is only for streams", "send stream: true with it")
    for name, value in (options or {}).items():
        if strict and name != "include_usage" and not (name == "include_obfuscation" and value is False):
            raise unsupported(f"stream_options.{name}", value, "is not supported here")
    return stream, flag(options or {}, "include_usage", False)


def calls_wanted(choice: object, tools: bool, strict: bool) -> bool:
    """Whether calls are parsed, by `tool_choice`. Forcing a call has no effect, and is refused with `strict`.
    Raises BadRequestError."""
    if choice == "none":
        return False
    if choice in (None, "auto") or not strict:
        return tools
    raise unsupported("tool_choice", choice, "calls cannot be forced: this would change how tokens are drawn")
