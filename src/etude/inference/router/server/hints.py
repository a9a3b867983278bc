"""What a request tells the router: its session, how long it is, which pool and version it wants."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import xxhash

from etude.errors import UserError
from etude.inference.headers import POOL_HEADER, SESSION_HEADER, VERSION_HEADER
from etude.inference.router.types import Ask
from etude.serving.json_bodies import parse_json

_BYTES_PER_TOKEN = 4.0
_MAX_TOKENS = 4096
"""Taken for the limit of a request that names none."""
_numbers = itertools.count(1)


def read_hints(headers: Mapping[str, str], body: bytes, pool: str = "serve") -> Ask:
    """Never fails: what does not parse, a replica will refuse with better words.

    Sessions are named by `x-session-id`, by OpenAI's `prompt_cache_key`, or else by the first two messages:
    a conversation sends them with each turn.
    """
    document = _document(body)
    session = headers.get(SESSION_HEADER) or _text(document.get("prompt_cache_key"))
    if session is None:
        messages = document.get("messages")
        if isinstance(messages, list) and len(messages) >= 2:
            opening = json.dumps(messages[:2], sort_keys=True, default=str)
            session = "opening-" + xxhash.xxh3_128_hexdigest(opening.encode("utf-8", "surrogatepass"))
    limits = (document.get("max_completion_tokens"), document.get("max_tokens"))
    limit = next((n for n in limits if isinstance(n, int) and n > 0), _MAX_TOKENS)
    version = headers.get(VERSION_HEADER)
    return Ask(
        f"q{next(_numbers)}",
        _prompt_tokens(document, body),
        limit,
        session,
        headers.get(POOL_HEADER) or pool,
        frozenset({version}) if version else None,
    )


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(body) if body else {}
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _prompt_tokens(document: Mapping[str, Any], body: bytes) -> int:
    """Exact for token ids, otherwise by the size."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return round(len(body) / _BYTES_PER_TOKEN)
