"""Client of a relay: a Folder over HTTP."""

from __future__ import annotations

import contextlib
from typing import Any, cast
from urllib.parse import quote

from etude.errors import StoreError
from etude.kit.retry import Backoff
from etude.serving.client import Answer, NoAnswerError, SyncClient
from etude.weights.folders import MissingError, UnavailableError

_TIMEOUT_S = 60.0
_BACKOFF = Backoff(base_s=0.4, attempts=3)
"""Retries without an answer: a relay may be restarting."""


class RelayFolder:
    """See Folder. Reads through a relay, which accepts only the notes that readers write for the writer."""

    def __init__(self, url: str, timeout_s: float = _TIMEOUT_S, token: str | None = None) -> None:
        """`timeout_s`: longest time without a byte. `token`: the relay's bearer token."""
        self._client = SyncClient(url, token, within_s=timeout_s, backoff=_BACKOFF, refusal=self._refusal)
        self.url = self._client.url

    def list(self, prefix: str) -> list[str]:
        answer = self._ask("GET", f"/list/{quote(prefix)}")
        names: Any = None
        with contextlib.suppress(ValueError):
            names = answer.json()
        if type(names) is not list:
            raise StoreError(
                f"is not the answer of a relay: {answer.text[:300]}",
                field="weights.url",
                received=self.url,
                fix="name a relay, which `etude relay` starts",
            )
        return cast("list[str]", names)

    def read(self, name: str) -> bytes:
        return self._ask("GET", f"/files/{quote(name)}").content

    def write(self, name: str, data: bytes) -> None:
        self._ask("PUT", f"/files/{quote(name)}", data)

    def create(self, name: str, data: bytes) -> None:
        """Raises StoreError: versions are not published through a relay."""
        raise StoreError(
            "a relay is read-only", field="weights.url", received=self.url, fix="publish to the store itself"
        )

    def delete(self, name: str) -> None:
        """See `create`."""
        self.create(name, b"")

    def sweep(self, prefix: str) -> None:
        """See `create`."""
        self.create(prefix, b"")

    def _ask(self, method: str, path: str, data: bytes = b"") -> Answer:
        try:
            return self._client.request(method, path, content=data, again=True)
        except NoAnswerError as error:
            raise UnavailableError(
                f"the relay does not answer: {error.message}",
                field="weights.url",
                received=self.url + path,
                fix="start it, or name the store itself",
            ) from error

    def _refusal(self, answer: Answer) -> Exception:
        where = str(answer.request.url)
        if answer.status_code == 404:
            return MissingError("there is no such file", field="weights.url", received=where)
        if answer.status_code == 401 and '"Host"' not in answer.text:
            return StoreError(
                "the relay needs a token, and got none or a wrong one",
                field="weights.token",
                received=self.url,
                fix="name its token: file:PATH or env:NAME",
            )
        kind = UnavailableError if answer.status_code == 503 else StoreError
        return kind(
            f"the relay answers {answer.status_code}: {answer.text[:300]}",
            field="weights.url",
            received=where,
            fix="check whether it can reach the store",
        )
