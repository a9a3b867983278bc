"""Reads token files, and creates those that do not exist."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from etude.errors import ConfigError
from etude.kit.secrets import read_private, read_secret
from etude.serving.listening import say

_TOKEN_BYTES = 32


def read_token(path: Path, server: str = "sandbox server") -> str:
    """The token in a file; if there is no file, writes a new token (mode 0600) and prints the file's path.

    The token itself is not printed, as others may read the logs. `server`: the name in the printed line.
    Raises ConfigError for a file that other users may read, or that has no token.
    """
    token = _make_token(path, "", server) or read_secret(f"file:{path}", "token_file")
    assert token is not None, "read_secret raises where there is none"
    return token


def read_tenants(path: Path, field: str = "tenants") -> dict[str, str]:
    """Token -> tenant, from lines `TENANT TOKEN`; `#` begins a comment.

    Raises ConfigError for a file that other users may read, a malformed line, or a token that occurs twice.
    """
    tokens: dict[str, str] = {}
    for number, line in enumerate(read_private(path, field).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[1] in tokens:
            raise ConfigError(
                "must be TENANT TOKEN, with each token only once",
                field=f"{field}: line {number}",
                received=str(path),
                fix="correct the line",
            )
        tokens[words[1]] = words[0]
    if not tokens:
        raise ConfigError("holds no token", field=field, received=str(path), fix="add TENANT TOKEN")
    return tokens


def read_or_make_tenants(path: Path, server: str) -> dict[str, str]:
    """As `read_tenants`; if there is no file, writes one (mode 0600) with a new token for `local`. `server`:
    the name in the printed line."""
    made = _make_token(path, "local ", server)
    return {made: "local"} if made is not None else read_tenants(path, "token_file")


def _make_token(path: Path, before: str, server: str) -> str | None:
    """Writes a new token into a new file, behind `before`; None if there is a file. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(
            f"cannot write the token: {error.strerror}",
            field="token_file",
            received=str(path),
            fix="name another",
        ) from error
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{before}{token}\n")
    say(server, f"a new token is in {path}")
    return token
