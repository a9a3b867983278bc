"""Grams: the short byte strings by which files are found.

Two kinds, from text whose ASCII letters are lower case. All *trigrams*; and *sparse n-grams* of 4 to 8 bytes,
as in GitHub's code search ("The technology behind GitHub's new code search", 2023): a string whose first and
last pair of bytes are both rarer than every pair between them. Whether a string is such a gram depends on
nothing around it, so each gram of a literal is a gram of every text that holds the literal; and because their
ends are rare pairs, the longest ones are the most selective. The rarity of pairs is counted in a sample of
the tree and stored with the index.

Only a 32-bit hash of a gram is stored: a collision costs a needless candidate, never a match.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

LONGEST_BYTES = 8
SHORTEST_SPARSE_BYTES = 4
_NUM_PAIRS = 1 << 16
_LINE_FEED = 10
_MULTIPLIER = np.uint32(0x9E3779B1)
_SPREAD = np.uint32(0x85EBCA6B)

Bytes = NDArray[np.uint8]
PairRanks = NDArray[np.uint16]
"""By `first | second << 8`: 0 for the commonest pair of bytes, 65535 for the rarest."""


def rank_pairs(samples: Iterable[bytes]) -> PairRanks:
    """Ranks all pairs of bytes by how often they occur in `samples`.

    Pairs with a line feed rank as the rarest: a match never spans lines, and rare pairs keep grams
    from growing across.
    """
    counts = np.zeros(_NUM_PAIRS, np.int64)
    for sample in samples:
        counts += np.bincount(_pairs(_lower(sample)), minlength=_NUM_PAIRS)
    pairs = np.arange(_NUM_PAIRS)
    counts[(pairs & 0xFF == _LINE_FEED) | (pairs >> 8 == _LINE_FEED)] = -1
    order = np.argsort(-counts, kind="stable")
    ranks = np.empty(_NUM_PAIRS, np.uint16)
    ranks[order] = np.arange(_NUM_PAIRS, dtype=np.uint16)
    return ranks


def gram_hashes(literal: bytes, ranks: PairRanks) -> NDArray[np.uint32]:
    """Hashes of all grams inside `literal`, which must be in lower case already. Longer grams come last."""
    text = np.frombuffer(literal, np.uint8)
    found = [hashes for hashes, _ in _grams(text, ranks)]
    return np.concatenate(found) if found else np.empty(0, np.uint32)


def text_keys(texts: list[bytes], documents: list[int], ranks: PairRanks, bits: int) -> NDArray[np.uint64]:
    """Keys `bucket << 16 | document`, sorted, each once, of the grams of a few texts.

    A bucket is the upper `bits` of a gram's hash.
    The texts are joined by line feeds, since many small files would otherwise cost a call each. A gram across
    a border counts for the text where it begins, which is harmless.
    """
    text = _lower(b"\n".join(texts) + b"\n")
    lengths = np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts))
    owners = np.repeat(np.array(documents, np.uint64), lengths)
    shift = np.uint32(32 - bits)
    keys: list[NDArray[np.uint64]] = []
    for hashes, where in _grams(text, ranks):
        key = (hashes >> shift).astype(np.uint64)
        key <<= np.uint64(16)
        key |= owners[: len(hashes)] if where is None else owners[where]
        keys.append(key)
    return sorted_unique(keys)


def sorted_unique(keys: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """All `keys` in order, each once. Empties the list: a segment's keys should not be held twice."""
    merged = np.concatenate(keys) if keys else np.empty(0, np.uint64)
    keys.clear()
    merged.sort()
    if len(merged) < 2:
        return merged
    fresh = np.empty(len(merged), np.bool_)
    fresh[0] = True
    np.not_equal(merged[1:], merged[:-1], out=fresh[1:])
    return merged[fresh]


def _lower(text: bytes) -> Bytes:
    return np.frombuffer(text.lower(), np.uint8)  # of bytes: ASCII letters only


def _pairs(text: Bytes) -> NDArray[np.uint16]:
    return text[:-1].astype(np.uint16) | text[1:].astype(np.uint16) << np.uint16(8)


def _grams(text: Bytes, ranks: PairRanks) -> Iterable[tuple[NDArray[np.uint32], NDArray[np.int64] | None]]:
    """For each length the hashes of all grams of that length, and where they begin (None: everywhere)."""
    count = len(text)
    if count < 3:
        return
    wide = text.astype(np.uint32)
    rolling = wide[:-2] | wide[1:-1] << np.uint32(8) | wide[2:] << np.uint32(16)
    yield _mixed(rolling, 3), None
    rank = ranks[_pairs(text)]
    highest = rank[1:-1]  # of the pairs inside a string of 4 bytes
    for length in range(SHORTEST_SPARSE_BYTES, LONGEST_BYTES + 1):
        fits = count - length + 1
        if fits < 1:
            return
        rolling = rolling[:fits] * _MULTIPLIER
        rolling += wide[length - 1 :]
        last = rank[length - 2 :]
        where = np.flatnonzero(highest < np.minimum(rank[:fits], last))
        yield _mixed(rolling[where], length), where
        highest = np.maximum(highest[:-1], last[:-1])


def _mixed(rolling: NDArray[np.uint32], length: int) -> NDArray[np.uint32]:
    """Mixes the hash into its high bits, which select the bucket."""
    mixed = rolling + np.uint32(length)
    mixed *= _SPREAD
    mixed ^= mixed >> np.uint32(15)
    mixed *= _MULTIPLIER
    return mixed
