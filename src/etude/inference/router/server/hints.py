"""What a request tells the router: its session, how long it is, which pool and version it wants."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Hints:
    """One request as the policy is asked about it, again for every attempt."""

    id: str
    session: str | None
    prompt_tokens: int
    max_tokens: int
    pool: str
    version: str | None

    def ask(self, attempt: int) -> Ask:
        """The policy's question for one attempt."""
        versions = frozenset({self.version}) if self.version is not None else None
        return Ask(
            f"{self.id}.{attempt}", self.prompt_tokens, self.max_tokens, self.session, self.pool, versions
        )


def read_hints(headers: Mapping[str, str], body: bytes, pool: str = "serve") -> Hints:
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
    return Hints(
        id=f"q{next(_numbers)}",
        session=session,
        prompt_tokens=_prompt_tokens(document, body),
        max_tokens=limit,
        pool=headers.get(POOL_HEADER) or pool,
        version=headers.get(VERSION_HEADER) or None,
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
