from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from xxhash import xxh3_64_intdigest

from etude.errors import PrefixMissError, SamplerError, WeightUpdateError
from etude.inference import wire
from etude.inference.exchange import Command
from etude.inference.router.types import NoReplicaError
from etude.records import (
    PolicyVersion,
    SampleChunk,
    SampleRequest,
    SamplingParams,
    Scores,
    TensorEntry,
    WeightManifest,
)

VERSIONS = st.builds(
    PolicyVersion,
    st.text(max_size=5),
    st.integers(0, 2**40),
    st.text(max_size=5),
    st.sampled_from(["float32", "bfloat16"]),
    st.none() | st.text(max_size=5),
)
TOKENS = arrays.arrays(np.int32, st.integers(0, 9))
FLOATS = arrays.arrays(np.float32, st.integers(0, 9))
ROUTES = st.none() | arrays.arrays(
    st.sampled_from([np.dtype(np.uint8), np.dtype(np.uint16)]),
    st.tuples(st.integers(0, 4), st.integers(1, 2), st.integers(1, 2)),
)
REQUESTS = st.builds(
    SampleRequest,
    st.text(max_size=5),
    st.text(max_size=5),
    TOKENS,
    st.builds(SamplingParams, temperature=st.floats(0, 2), max_tokens=st.integers(1, 99)),
    st.frozensets(st.integers(0, 1000), max_size=3),
    st.lists(st.integers(0, 2**62), max_size=3).map(tuple),
    prefix_digest=st.none() | st.text(max_size=5),
    version=st.none() | VERSIONS,
    version_is_minimum=st.booleans(),
    deadline_s=st.none() | st.floats(0, 9),
)
CHUNKS = st.builds(
    SampleChunk,
    TOKENS,
    FLOATS,
    VERSIONS,
    VERSIONS,
    routes=ROUTES,
    routes_start=st.integers(0, 99),
    finish=st.none() | st.sampled_from(["stop", "length", "abort"]),
    raw_logprobs=st.none() | FLOATS,
    cached_tokens=st.none() | st.integers(0, 99),
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), field.name
        else:
            assert a == b, field.name


@given(st.lists(REQUESTS, max_size=3), st.lists(st.text(max_size=5), max_size=3))
def test_commands_arrive_as_they_were_sent(requests: list[SampleRequest], names: list[str]) -> None:
    sent: list[Command] = [("close", "s"), ("abort", "r")]
    for name in names:
        sent.append(("open", name))
    for one in requests:
        sent.append(("stream", one))
    found = wire.unpack(wire.pack(sent))
    assert [name for name, _ in found] == [name for name, _ in sent]
    for (_, a), (_, b) in zip(sent, found, strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            assert_same(a, b)


@given(st.lists(CHUNKS, max_size=3))
def test_chunks_arrive_bit_for_bit(chunks: list[SampleChunk]) -> None:
    found = wire.unpack(wire.pack([*(("r", chunk) for chunk in chunks), ("r", None)]))
    assert found[-1] == ("r", None)
    for chunk, (name, other) in zip(chunks, found, strict=False):
        assert name == "r"
        assert_same(chunk, other)


def test_errors_keep_their_kind_and_their_fields() -> None:
    sent = [
        PrefixMissError("gone", field="prefix_digest", received="abc", fix="send all"),
        WeightUpdateError("too large", received=(1, 2)),
        NoReplicaError("none is ready", field="pool"),
    ]
    found = [error for _, error in wire.unpack(wire.pack([("r", one) for one in sent]))]
    assert [type(one) for one in found] == [PrefixMissError, WeightUpdateError, SamplerError]
    assert [str(one) for one in found[:1]] == [str(sent[0])]
    assert isinstance(found[1], WeightUpdateError)
    assert found[1].received == [1, 2]


@given(ROUTES)
def test_scores_arrive_bit_for_bit(routes: Any) -> None:
    scores = Scores(np.array([0, -0.5], dtype=np.float32), PolicyVersion("run", 3, "d"), routes)
    assert_same(scores, wire.unpack(wire.pack(scores)))
    tokens, version = wire.unpack(wire.pack([np.arange(4, dtype=np.int32), scores.version]))
    assert version == scores.version
    assert tokens.tolist() == [0, 1, 2, 3]


def test_manifests_and_tables_arrive_as_they_were_sent() -> None:
    entry = TensorEntry("a.weight", (2, 3), "float32", "digest")
    manifest = WeightManifest(PolicyVersion("run", 1), (entry,), "memory:1", PolicyVersion("run", 0))
    sent = {"manifest": manifest, "more": {"array": 1, "tuple": (1, None)}}
    assert wire.unpack(wire.pack(sent)) == sent


@given(st.data())
def test_damage_is_noticed(data: st.DataObject) -> None:
    request = SampleRequest("r", "s", np.arange(5, dtype=np.int32), SamplingParams(), frozenset({1}), (1, 2))
    message = bytearray(wire.pack([("stream", request)]))
    if data.draw(st.booleans()):
        message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del message[data.draw(st.integers(0, len(message) - 1)) :]
    with pytest.raises(wire.DamagedMessageError):
        wire.unpack(bytes(message))


def test_a_shape_beyond_all_bounds_is_damage() -> None:
    head = json.dumps({"arrays": [["int32", [1 << 40, 1 << 40]]], "content": None}).encode()
    body = wire._HEAD.pack(wire.MAGIC, wire.FORMAT_VERSION, len(head)) + head
    with pytest.raises(wire.DamagedMessageError, match="cut"):
        wire.unpack(body + wire._CHECKSUM.pack(xxh3_64_intdigest(body)))


@pytest.mark.parametrize(
    "content", [{"array": 1}, {"SampleRequest": {"id": 1}}, {"Path": {}}, {"a": 1, "b": 2}]
)
def test_messages_that_say_something_else_are_refused(content: Any) -> None:
    head = json.dumps({"arrays": [], "content": content}).encode()
    body = wire._HEAD.pack(wire.MAGIC, wire.FORMAT_VERSION, len(head)) + head
    with pytest.raises(wire.DamagedMessageError):
        wire.unpack(body + wire._CHECKSUM.pack(xxh3_64_intdigest(body)))
