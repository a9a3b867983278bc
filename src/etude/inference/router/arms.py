"""Which policy version a session gets in an A/B test: by share, sticky, without a table.

Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): every arm draws an exponential number from
the hash of (session, arm), divided by its share; the least wins. Another router decides alike, and when an
arm comes or goes, only the sessions that it wins or loses move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import xxhash

_RANGE = float(1 << 64)


def choose_arm(key: str, shares: Mapping[str, float]) -> str | None:
    """The arm of this session. Arms of share 0 get nothing; None where no arm is left."""
    drawn = {
        arm: -math.log((xxhash.xxh3_64_intdigest(f"{arm}\0{key}".encode()) + 0.5) / _RANGE) / share
        for arm, share in shares.items()
        if share > 0.0
    }
    return min(drawn, key=lambda arm: (drawn[arm], arm), default=None)
