"""Derives routing facts from a request: session, lengths, pool and version."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import xxhash

from etude.inference.headers import POOL_HEADER, SESSION_HEADER, VERSION_HEADER
from etude.inference.router.server.events import object_in
from etude.inference.router.types import RouteRequest

_BYTES_PER_TOKEN = 4.0
_MAX_TOKENS = 4096
"""Assumed limit of a request that names none."""
_numbers = itertools.count(1)


def read_hints(headers: Mapping[str, str], body: bytes, pool: str = "serve") -> RouteRequest:
    """The routing facts of a request. Never fails: a replica refuses malformed requests with better messages.

    Sessions are identified by `x-session-id`, by OpenAI's `prompt_cache_key`, or else by the first two
    messages, which a conversation sends with each turn.
    """
    document = object_in(body)
    key = document.get("prompt_cache_key")
    session = headers.get(SESSION_HEADER) or (key if isinstance(key, str) and key else None)
    if session is None:
        messages = document.get("messages")
        if isinstance(messages, list) and len(messages) >= 2:
            opening = json.dumps(messages[:2], sort_keys=True, default=str)
            session = "opening-" + xxhash.xxh3_128_hexdigest(opening.encode("utf-8", "surrogatepass"))
    limits = (document.get("max_completion_tokens"), document.get("max_tokens"))
    limit = next((n for n in limits if isinstance(n, int) and n > 0), _MAX_TOKENS)
    version = headers.get(VERSION_HEADER)
    return RouteRequest(
        f"q{next(_numbers)}",
        _prompt_tokens(document, body),
        limit,
        session,
        headers.get(POOL_HEADER) or pool,
        frozenset({version}) if version else None,
    )


def _prompt_tokens(document: Mapping[str, Any], body: bytes) -> int:
    """Length of the prompt: exact for token ids, otherwise estimated from the size of the body."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return round(len(body) / _BYTES_PER_TOKEN)
