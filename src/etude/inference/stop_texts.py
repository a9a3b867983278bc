"""Stop texts: found in the bytes of sampled tokens, wherever the tokens' edges lie."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Watches one request's sampled tokens."""

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts`: not empty, none of them the empty text."""
        self._texts = [text.encode() for text in texts]
        self._kept = max(len(text) for text in self._texts) - 1
        self._tail = b""

    def completes(self, piece: bytes) -> bool:
        """Takes the next token's bytes; whether one of the texts ends within them."""
        window = self._tail + piece
        self._tail = window[len(window) - self._kept :] if self._kept < len(window) else window
        return any(text in window for text in self._texts)
