"""A relay's folder, as its replicas see it."""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast
from urllib.parse import quote

import httpx

from etude.config.secrets import bearer
from etude.errors import StoreError
from etude.weights.folders import MissingError, UnavailableError

_TIMEOUT_S = 60.0
_ATTEMPTS = 3
_PAUSE_S = 0.2


class RelayFolder:
    """See Folder. Reads through a relay; of writing, what readers leave for the writer gets through."""

    def __init__(self, url: str, timeout_s: float = _TIMEOUT_S, token: str | None = None) -> None:
        """`timeout_s`: without a byte. `token`: what the relay asks for."""
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url, timeout=timeout_s, trust_env=False, headers=bearer(token)
        )

    def list(self, prefix: str) -> list[str]:
        """See Folder.list."""
        response = self._ask("GET", f"/list/{quote(prefix)}")
        names: Any = None
        with contextlib.suppress(ValueError):
            names = response.json()
        if type(names) is not list:
            raise StoreError(
                f"answers as no relay does: {response.text[:300]}",
                field="weights.url",
                received=self.url,
                fix="name a relay, as `etude relay` serves one",
            )
        return cast("list[str]", names)

    def read(self, name: str) -> bytes:
        """See Folder.read."""
        return self._ask("GET", f"/files/{quote(name)}").content

    def write(self, name: str, data: bytes) -> None:
        """See Folder.write."""
        self._ask("PUT", f"/files/{quote(name)}", data)

    def create(self, name: str, data: bytes) -> None:
        """Nobody publishes through a relay. Raises StoreError."""
        raise StoreError(
            "a relay only reads", field="weights.url", received=self.url, fix="publish to the store itself"
        )

    def delete(self, name: str) -> None:
        """See `create`."""
        self.create(name, b"")

    def sweep(self, prefix: str) -> None:
        """See `create`."""
        self.create(prefix, b"")

    def _ask(self, method: str, path: str, data: bytes | None = None) -> httpx.Response:
        """Asks again where no answer came: a relay may be starting anew."""
        failure: httpx.HTTPError | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2**attempt)
            try:
                response = self._client.request(method, path, content=data)
            except httpx.HTTPError as error:
                failure = error
                continue
            if response.status_code == 404:
                raise MissingError("there is nothing here", field="weights.url", received=self.url + path)
            if response.is_success:
                return response
            if response.status_code == 401 and '"Host"' not in response.text:
                raise StoreError(
                    "the relay asks for a token, and got none or another",
                    field="weights.token",
                    received=self.url,
                    fix="name where its token is: file:PATH or env:NAME",
                )
            kind = UnavailableError if response.status_code == 503 else StoreError
            raise kind(
                f"the relay answers {response.status_code}: {response.text[:300]}",
                field="weights.url",
                received=self.url + path,
                fix="see whether it reaches the store",
            )
        raise UnavailableError(
            f"the relay does not answer: {failure!r}",
            field="weights.url",
            received=self.url + path,
            fix="start it, or name the store itself",
        ) from failure
