"""API keys and rate limits: bearer tokens of named keys, each with its own limits.

The tokens file has one line per key; options after the token override the server's defaults:

    alice:sk-5f0c...
    rollout:sk-77aa... requests=512 tokens_per_minute=0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from etude.errors import ConfigError
from etude.inference.server.errors import RateLimitError, RefusedKeyError
from etude.kit.secrets import read_private
from etude.serving.access import find_token
from etude.tokens.chat.errors import BadRequestError

_MIN_TOKEN_CHARACTERS = 16
_OPEN_KEY = "anyone"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key. 0 means no limit."""

    requests: int = 256
    """Concurrent answers; each of `n` samples and of several prompts counts."""
    tokens_per_minute: int = 0
    """Prompt and sampled tokens together. Bursts of up to one minute's tokens are allowed."""


@dataclass(slots=True, eq=False)
class Key:
    """One key and its usage. Tokens per minute are a token bucket, whose level may become negative, since the
    length of an answer is not known beforehand."""

    name: str
    token: str
    limits: KeyLimits
    clock: Callable[[], float] = time.monotonic
    running: int = 0
    _level: float = field(init=False)
    _filled_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._level, self._filled_s = float(self.limits.tokens_per_minute), self.clock()

    def begin_requests(self, num_requests: int) -> None:
        """Counts requests that begin. Raises RateLimitError, or BadRequestError where waiting would not help,
        without changing anything."""
        limit = self.limits.requests
        if limit and num_requests > limit:
            raise BadRequestError(
                "more samples in one request than the key may run at once",
                field="n",
                received=num_requests,
                fix=f"ask for at most {limit}",
            )
        if limit and self.running + num_requests > limit:
            raise RateLimitError(
                "too many requests at once",
                field="Authorization",
                received=self.running + num_requests,
                fix=f"send at most {limit} at the same time; wait for one to end",
            )
        self._fill()
        rate = self.limits.tokens_per_minute
        if rate and self._level <= 0:
            raise RateLimitError(
                "too many tokens in this minute",
                field="Authorization",
                received=round(rate - self._level),
                fix=f"use at most {rate} tokens a minute",
                retry_after_s=(1 - self._level) * 60 / rate,
            )
        self.running += num_requests

    def end_requests(self, num_requests: int) -> None:
        """Counts requests that have ended."""
        self.running -= num_requests

    def charge(self, num_tokens: int) -> None:
        """Takes tokens that were computed for this key from the bucket."""
        if self.limits.tokens_per_minute:
            self._fill()
            self._level -= num_tokens

    def _fill(self) -> None:
        rate, now_s = self.limits.tokens_per_minute, self.clock()
        self._level = min(float(rate), self._level + (now_s - self._filled_s) * rate / 60)
        self._filled_s = now_s


class Keys:
    """All keys of a server. Without any, all requests are accepted under one shared key."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        """`keys`: by token."""
        self._keys = dict(keys)
        self._open = Key(_OPEN_KEY, "", KeyLimits(requests=0)) if not keys else None

    def find(self, token: str) -> Key:
        """The key of a bearer token. Raises RefusedKeyError."""
        if self._open is not None:
            return self._open
        found = find_token(self._keys, token)
        if found is None:
            raise RefusedKeyError(
                "no such key" if token else "the key is missing",
                field="Authorization",
                fix="send `Authorization: Bearer TOKEN` with a token of the server's tokens file",
            )
        return found


def read_keys(path: Path, defaults: KeyLimits) -> Keys:
    """The keys of a tokens file. Raises ConfigError for one that others may read, or that is malformed."""
    keys: dict[str, Key] = {}
    for number, line in enumerate(read_private(path, "--tokens-file").splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            key = _key(line, f"{path}:{number}", defaults)
            if key.token in keys or any(key.name == other.name for other in keys.values()):
                raise ConfigError(
                    "a name or a token occurs twice", field=f"{path}:{number}", received=key.name
                )
            keys[key.token] = key
    if not keys:
        raise ConfigError(
            "holds no token", field="--tokens-file", received=str(path), fix="write lines of NAME:TOKEN"
        )
    return Keys(keys)


def _key(line: str, place: str, defaults: KeyLimits) -> Key:
    head, *options = line.split()
    name, _, token = head.partition(":")
    if not name or len(token) < _MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"must be NAME:TOKEN, the token of at least {_MIN_TOKEN_CHARACTERS} characters",
            field=place,
            received=f"a name of {len(name)} and a token of {len(token)} characters",
            fix="make one with `openssl rand -hex 24`",
        )
    limits = defaults
    for option in options:
        what, _, value = option.partition("=")
        if what not in KeyLimits.__dataclass_fields__ or not value.isdecimal():
            raise ConfigError(
                "no such limit", field=place, received=option, fix="use requests=N or tokens_per_minute=N"
            )
        limits = replace(limits, **{what: int(value)})
    return Key(name, token, limits)
