"""Client for the binary side channel of answers, whichever client requested them."""

from __future__ import annotations

from etude.errors import SamplerError
from etude.inference.server.side_channel import SIDE_CHANNEL_PATH, WANT_TOKENS, ChoiceTokens, decode
from etude.serving.client import Answer, SyncClient

__all__ = ["WANT_TOKENS", "SideChannelClient"]


class SideChannelClient:
    """Reads the tokens of answers. Use as a context manager."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 60.0) -> None:
        """`url`: of the server, with or without `/v1`."""
        root = url.rstrip("/").removesuffix("/v1")
        self._http = SyncClient(root, key, within_s=timeout_s, refusal=_refusal, outside=True)

    def __enter__(self) -> SideChannelClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fetch(self, answer_id: str) -> list[ChoiceTokens]:
        """The tokens of all choices of an answer, by its id. Raises SamplerError, and NoAnswerError where the
        server does not answer."""
        return decode(self._http.request("GET", f"{SIDE_CHANNEL_PATH}/{answer_id}").content)


def _refusal(answer: Answer) -> SamplerError:
    return SamplerError(
        "the server refuses the tokens",
        field="id",
        received=f"{answer.status_code} {answer.text[:300]}",
        fix="send the header x-etude-extensions: tokens with the request, and fetch soon after it",
    )
