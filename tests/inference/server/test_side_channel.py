"""Token ids, versions and routes beside the JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.errors import SamplerError
from etude.inference.server.client import WANT_TOKENS, SideChannelClient
from etude.inference.server.errors import NoSuchAnswerError
from etude.inference.server.limits import Key, KeyLimits, Keys
from etude.inference.server.side_channel import (
    ChoiceTokens,
    SideChannel,
    Span,
    choice_tokens,
    decode,
    encode,
)
from etude.inference.wire import DamagedMessageError
from etude.records import PolicyVersion, SampleChunk
from tests.environment.recording.recording_builders import answer_tokens
from tests.inference.server.serving import MODEL, PlayedSampler, make_state, serving

openai = pytest.importorskip("openai", reason="the openai client is not installed")

TEXT = "Some words and more."
VERSIONS = st.builds(PolicyVersion, st.text(max_size=5), st.integers(0, 9), st.text(max_size=5))


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def alike(one: ChoiceTokens, other: ChoiceTokens) -> bool:
    names = ("prompt", "tokens", "logprobs", "raw_logprobs", "routes")
    arrays = all(same(getattr(one, name), getattr(other, name)) for name in names)
    return arrays and one.spans == other.spans and one.routes_start == other.routes_start


@st.composite
def choices(draw: st.DrawFn) -> ChoiceTokens:
    count = draw(st.integers(0, 20))
    dtype = draw(st.sampled_from([np.uint8, np.uint16]))
    shape = draw(st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(0, 3)))
    return ChoiceTokens(
        draw(hnp.arrays(np.int32, draw(st.integers(0, 20)))),
        draw(hnp.arrays(np.int32, count)),
        draw(hnp.arrays(np.float32, count)),
        draw(st.none() | hnp.arrays(np.float32, count)),
        tuple(
            draw(
                st.lists(
                    st.builds(Span, st.integers(0, 9), st.integers(0, 9), VERSIONS, VERSIONS), max_size=3
                )
            )
        ),
        draw(st.none() | hnp.arrays(dtype, shape)),
        0,
    )


@given(st.lists(choices(), max_size=3))
def test_frames_come_back_as_they_went(listed: list[ChoiceTokens]) -> None:
    found = decode(encode(listed))
    assert len(found) == len(listed)
    assert all(alike(one, other) for one, other in zip(listed, found, strict=True))


@given(choices(), st.data())
def test_no_cut_and_no_altered_byte_goes_unseen(choice: ChoiceTokens, data: st.DataObject) -> None:
    body = encode([choice])
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(DamagedMessageError):
        decode(body[:cut])
    place = data.draw(st.integers(0, len(body) - 1))
    altered = bytearray(body)
    altered[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedMessageError):
        decode(bytes(altered))


def chunk(tokens: list[int], start: int, rows: int, step: int = 0, value: int = 1) -> SampleChunk:
    version = PolicyVersion("r", step)
    routes = np.full((rows, 2, 2), value, dtype=np.uint16) if rows else None
    ids = np.array(tokens, dtype=np.int32)
    return SampleChunk(ids, -ids.astype(np.float32), version, PolicyVersion("r", 0), routes, start)


def test_chunks_are_put_together_and_later_routes_replace_earlier_ones() -> None:
    chunks = [chunk([1, 2], 0, 5), chunk([3], 5, 1), chunk([4], 0, 7, step=1, value=9), chunk([], 0, 0)]
    found = choice_tokens(np.arange(4, dtype=np.int32), chunks)
    assert found.tokens.tolist() == [1, 2, 3, 4] and found.logprobs.tolist() == [-1, -2, -3, -4]
    assert [(span.start, span.end, span.version.step) for span in found.spans] == [(0, 3, 0), (3, 4, 1)]
    assert found.routes is not None and found.routes.dtype == np.uint16
    assert found.routes.shape == (7, 2, 2) and (found.routes == 9).all()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_where_each_token_came_from(stream: bool) -> None:
    sampler = PlayedSampler(lambda context: TEXT, swap_after=2)
    with serving(make_state(sampler)) as served:
        options: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "n": 2}
        client = served.openai()
        raw = client.chat.completions.with_raw_response.create(
            **options, extra_headers=WANT_TOKENS, stream=stream
        )
        answer = raw.parse()
        identity = next(iter(answer)).id if stream else answer.id
        assert raw.headers["x-etude-side-channel"] == f"/v1/side_channel/{identity}"
        with SideChannelClient(str(client.base_url)) as channel:
            found = channel.fetch(identity)
            assert [alike(*pair) for pair in zip(found, channel.fetch(identity), strict=True)] == [True] * 2
    for one in found:
        assert one.prompt.tolist() == sampler.requests[0].suffix.tolist()
        assert one.tokens.tolist() == answer_tokens(TEXT).tolist()
        assert one.logprobs.tolist() == [-place / 64 for place in range(len(one.tokens))]
        assert [(span.start, span.version.step) for span in one.spans] == [(0, 0), (6, 1)]
        assert one.spans[-1].end == len(one.tokens)
        assert one.routes is not None and one.routes_start == 0
        assert one.routes.shape == (len(one.prompt) + len(one.tokens) - 1, 2, 2)


def test_tokens_are_for_the_key_that_asked_and_only_on_request() -> None:
    tokens = {name: name + "-token-of-16-characters" for name in ("alice", "bob")}
    keys = Keys({token: Key(name, token, KeyLimits()) for name, token in tokens.items()})
    with serving(make_state(PlayedSampler(lambda context: TEXT), keys=keys)) as served:
        client = served.openai(tokens["alice"])
        asked = client.completions.create(model=MODEL, prompt="x", extra_headers=WANT_TOKENS)
        silent = client.completions.create(model=MODEL, prompt="x")
        with SideChannelClient(served.url, tokens["alice"]) as channel:
            assert len(channel.fetch(asked.id)) == 1
            with pytest.raises(SamplerError, match="404"):
                channel.fetch(silent.id)
        with (
            SideChannelClient(served.url, tokens["bob"]) as channel,
            pytest.raises(SamplerError, match="404"),
        ):
            channel.fetch(asked.id)


def test_a_side_channel_is_bounded_in_bytes_and_time() -> None:
    now = [0.0]
    channel = SideChannel(keep_s=10, max_bytes=100, clock=lambda: now[0])
    channel.put("a", "k", b"x" * 60)
    channel.put("b", "k", b"x" * 60)
    assert channel.get("b", "k") == b"x" * 60
    with pytest.raises(NoSuchAnswerError):
        channel.get("a", "k")
    now[0] = 11.0
    with pytest.raises(NoSuchAnswerError):
        channel.get("b", "k")
