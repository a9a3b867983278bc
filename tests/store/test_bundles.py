"""Trajectories that travel between machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from etude.errors import StoreError
from etude.records import BlobRef, Trajectory
from etude.store.blobs import MemoryBlobs
from etude.store.bundles import MAGIC, pack_trajectory, unpack_trajectory
from tests.store.builders import make_trajectory, same, trajectories

LIMIT = 1 << 24


def without_blobs(trajectory: Trajectory) -> Trajectory:
    segments = tuple(replace(segment, routes=None, support=None) for segment in trajectory.segments)
    return replace(trajectory, segments=segments)


def routed() -> tuple[Trajectory, MemoryBlobs]:
    """A trajectory whose expert routes and supports lie in a store of their own."""
    blobs, plain = MemoryBlobs(), without_blobs(make_trajectory())
    length = len(plain.segments[0].tokens)
    routes = np.arange(length * 6, dtype=np.uint16).reshape(length, 3, 2)
    support = np.arange(length, dtype=np.int64)
    segment = replace(plain.segments[0], routes=blobs.put(routes), support=blobs.put(support))
    return replace(plain, segments=(segment, *plain.segments[1:])), blobs


def none_to_get(ref: BlobRef) -> NDArray[Any]:
    raise AssertionError(f"it names no blobs: {ref}")


@pytest.mark.slow
@given(trajectories())
def test_whatever_can_be_recorded_comes_back_equal(trajectory: Trajectory) -> None:
    plain = without_blobs(trajectory)
    found = unpack_trajectory(pack_trajectory(plain, none_to_get), LIMIT).store_blobs(MemoryBlobs().put)
    assert same(found, plain)


def test_expert_routes_travel_along_and_are_named_anew() -> None:
    trajectory, blobs = routed()
    elsewhere = MemoryBlobs()
    found = unpack_trajectory(pack_trajectory(trajectory, blobs.get), LIMIT).store_blobs(elsewhere.put)
    for name in ("routes", "support"):
        sent, kept = getattr(trajectory.segments[0], name), getattr(found.segments[0], name)
        assert kept is not None
        assert np.array_equal(elsewhere.get(kept), blobs.get(sent))
        assert (kept.digest, kept.dtype, kept.shape) == (sent.digest, sent.dtype, sent.shape)
    assert same(without_blobs(found), without_blobs(trajectory))


@given(st.data())
def test_a_flipped_bit_anywhere_is_refused(data: st.DataObject) -> None:
    trajectory, blobs = routed()
    packed = bytearray(pack_trajectory(trajectory, blobs.get))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(StoreError):
        unpack_trajectory(bytes(packed), LIMIT)


@given(st.integers(0, 10_000))
def test_half_a_bundle_is_refused(length: int) -> None:
    trajectory, blobs = routed()
    packed = pack_trajectory(trajectory, blobs.get)
    with pytest.raises(StoreError):
        unpack_trajectory(packed[: length % len(packed)], LIMIT)


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        unpack_trajectory(data, LIMIT)


def test_what_unpacks_to_more_than_is_taken_is_refused_unread() -> None:
    trajectory, blobs = routed()
    with pytest.raises(StoreError, match="too large when unpacked"):
        unpack_trajectory(pack_trajectory(trajectory, blobs.get), 100)


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b'{"lengths": [1000000000000000000000], "blobs": [[null, null]]}'],
    ids=["depth", "length"],
)
def test_lengths_and_depths_beyond_all_bounds_are_refused(header: bytes) -> None:
    content = zstandard.compress(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StoreError, match="not a complete session"):
        unpack_trajectory(MAGIC + blake3(content).digest() + content, LIMIT)
