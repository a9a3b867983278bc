"""The base class of the sections of a configuration, and types of fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A group of fields. Unknown keys are refused; the text beneath a field is its documentation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def _names_a_place(source: str) -> str:
    kind, _, name = source.partition(":")
    if source and (kind not in ("file", "env") or not name):
        # The given value may be the secret itself, which must not appear in a message.
        raise ValueError("must be file:PATH or env:NAME, the secret's source; the value is not shown")
    return source


SecretSource = Annotated[str, AfterValidator(_names_a_place)]
"""Source of a secret, which a configuration never contains, since it is stored with the run: `file:PATH`
(which only its owner may read), `env:NAME` (a variable of the environment), or empty: none."""


def _begins_with_http(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"must begin with http:// or https://, received {url!r}")
    return url


HttpAddress = Annotated[str, AfterValidator(_begins_with_http)]
"""`http://HOST:PORT`, or https; empty: none."""
