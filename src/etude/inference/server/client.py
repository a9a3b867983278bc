"""Fetches the binary side channel of an answer that OpenAI's client (or any other) has got."""

from __future__ import annotations

import httpx

from etude.errors import SamplerError
from etude.inference.server.side_channel import SIDE_CHANNEL_PATH, WANT_TOKENS, ChoiceTokens, decode

__all__ = ["WANT_TOKENS", "SideChannelClient"]


class SideChannelClient:
    """Reads the tokens of answers. Use as a context manager."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 60.0) -> None:
        """`url`: of the server, with or without `/v1`."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=_root(url), headers=headers, timeout=timeout_s)

    def __enter__(self) -> SideChannelClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fetch(self, answer_id: str) -> list[ChoiceTokens]:
        """The tokens of all choices of an answer, by its id. Raises SamplerError and StoreError."""
        try:
            answer = self._http.get(f"{SIDE_CHANNEL_PATH}/{answer_id}")
        except httpx.HTTPError as error:
            raise SamplerError("the server does not answer", received=repr(error)) from error
        if answer.status_code != 200:
            raise SamplerError(
                "the server refuses the tokens",
                field="id",
                received=f"{answer.status_code} {answer.text[:300]}",
                fix="send the header x-etude-extensions: tokens with the request, and fetch soon after it",
            )
        return decode(answer.content)


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
