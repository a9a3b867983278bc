"""Reads secrets from the private file or environment variable that a configuration or option names."""

from __future__ import annotations

import os
from pathlib import Path

from etude.errors import ConfigError


def read_secret(source: str, field: str) -> str | None:
    """The secret at `source` (`file:PATH` or `env:NAME`), stripped of white space; None if `source` is empty.

    `field`: the configuration field, for messages, which never contain the secret itself. Raises ConfigError
    if there is no secret, if it has more than one word, or if other users may read the file.
    """
    if not source:
        return None
    kind, _, name = source.partition(":")
    if kind not in ("file", "env") or not name:
        # `source` may be the secret itself, which must not be in a message.
        raise ConfigError(
            "must be file:PATH or env:NAME",
            field=field,
            received=f"{len(source)} characters, not shown",
            fix="name a file with only the token, or a variable that is set to it",
        )
    text = read_private(Path(name), field) if kind == "file" else os.environ.get(name, "")
    words = text.split()
    if len(words) != 1:
        raise ConfigError(
            "is empty or not set" if not words else "holds more than one word",
            field=field,
            received=source,
            fix="name a file with only the token, or a variable that is set to it",
        )
    return words[0]


def read_secret_file(path: Path | None, field: str) -> str | None:
    """The secret in a file, as `read_secret` reads it; None if `path` is None."""
    return read_secret(f"file:{path}" if path is not None else "", field)


def read_private(path: Path, field: str) -> str:
    """The text of a file that only its owner may read. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(
            f"cannot be read: {reason}", field=field, received=str(path), fix="name another file"
        ) from error
    if mode & 0o077:
        raise ConfigError("other users can read it", field=field, received=str(path), fix=f"chmod 600 {path}")
    return text
