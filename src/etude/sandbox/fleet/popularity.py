"""How often each image was asked for lately: counts that halve with every half-life."""

from __future__ import annotations

import heapq
import math

MAX_IMAGES = 100_000
_MAX_EXPONENT = 500.0
"""2 to this power is still far from the largest float."""


class Popularity:
    """Decayed counts by image. Instead of all counts decaying, each new one weighs more."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._epoch_s: float | None = None
        self._counts: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    def add(self, image: str, image_bytes: int, now_s: float) -> None:
        """One more request for an image of that size."""
        weight = 2.0 ** self._exponent(now_s)
        self._counts[image] = self._counts.get(image, 0.0) + weight
        self._bytes[image] = image_bytes
        if len(self._counts) > MAX_IMAGES:
            self._forget()

    def count(self, image: str, now_s: float) -> float:
        """Requests of late: one made just now counts 1, one made a half-life ago 0.5."""
        return self._counts.get(image, 0.0) / 2.0 ** self._exponent(now_s)

    def image_bytes(self, image: str) -> int:
        """Size of an image that was asked for; 0 for one that never was or was forgotten."""
        return self._bytes.get(image, 0)

    def _exponent(self, now_s: float) -> float:
        if self._epoch_s is None:
            self._epoch_s = now_s
        exponent = (now_s - self._epoch_s) / self._half_life_s
        if exponent > _MAX_EXPONENT:
            scale = math.ldexp(1.0, -int(_MAX_EXPONENT))
            self._counts = {image: count * scale for image, count in self._counts.items()}
            self._epoch_s += int(_MAX_EXPONENT) * self._half_life_s
            return self._exponent(now_s)
        return exponent

    def _forget(self) -> None:
        """Drops the less popular half."""
        kept = heapq.nlargest(MAX_IMAGES // 2, self._counts, key=self._counts.__getitem__)
        self._counts = {image: self._counts[image] for image in kept}
        self._bytes = {image: self._bytes[image] for image in kept}
