"""Sources of secrets. A configuration never contains secrets themselves, since it is stored with the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _names_a_place(source: str) -> str:
    kind, _, name = source.partition(":")
    if source and (kind not in ("file", "env") or not name):
        # The given value may be the secret itself, which must not appear in a message.
        raise ValueError("must be file:PATH or env:NAME, the secret's source; the value is not shown")
    return source


SecretSource = Annotated[str, AfterValidator(_names_a_place)]
"""`file:PATH` (which only its owner may read), `env:NAME` (a variable of the environment), or empty: none."""
