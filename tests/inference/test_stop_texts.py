"""Stop texts are found in the sampled bytes, wherever tokens end, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SamplerError
from etude.inference.sequences import StopTexts
from tests.inference.builders import Client, drain, prompt, small_engine
from tests.model.builders import small_model


def _bytes(tokens: Sequence[int]) -> bytes:
    """Tokens 0..63 as one or two letters: several spell a text together."""
    return b"".join(bytes([97 + token % 7]) * (1 + token % 2) for token in tokens)


@given(
    st.lists(st.text("ab<é", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.binary(max_size=3) | st.sampled_from([b"a", b"<", b"ab", b"\xc3", b"\xa9"]), max_size=20),
)
def test_a_text_ends_at_the_first_piece_that_completes_it(texts: list[str], pieces: list[bytes]) -> None:
    watch = StopTexts(texts)
    wanted = [text.encode() for text in texts]
    for count, piece in enumerate(pieces, 1):
        expected = any(text in b"".join(pieces[:count]) for text in wanted)
        assert watch.completes(piece) == expected
        if expected:
            return


def test_sampling_ends_with_the_token_that_completes_a_text_and_not_in_the_prompt() -> None:
    engine = small_engine(small_model(4), token_bytes=_bytes)
    free = Client("free", 5)
    free.ask(engine, prompt(30, 0), max_tokens=30)
    drain(engine, [free])
    sampled = _bytes(free.tokens[30:])
    text = sampled[9:13].decode()
    end = next(n for n in range(31) if text.encode() in _bytes(free.tokens[30 : 30 + n]))
    stopped = Client("stopped", 5)
    asked = [*prompt(30, 0)]
    stopped.ask(engine, asked, max_tokens=30, stop_texts=("no such text", text))
    drain(engine, [stopped])
    assert (stopped.finish, stopped.tokens) == ("stop", free.tokens[: 30 + end])
    in_prompt = Client("in the prompt", 5)
    known = _bytes(asked)[-4:].decode()
    in_prompt.ask(engine, asked, max_tokens=1, stop_texts=(known,))
    drain(engine, [in_prompt])
    assert in_prompt.finish == ("stop" if known.encode() in _bytes(in_prompt.tokens[30:]) else "length")


def test_texts_are_not_carried_into_the_next_message() -> None:
    engine = small_engine(small_model(4), token_bytes=_bytes)
    client = Client("s", 5)
    client.ask(engine, prompt(10, 0), max_tokens=4)
    drain(engine, [client])
    tail = _bytes(client.tokens[-1:]).decode()
    client.ask(engine, [], max_tokens=1, stop_texts=(tail + "aabb",))
    drain(engine, [client])
    assert client.finish == "length"


def test_an_engine_that_knows_no_bytes_refuses_stop_texts_by_name() -> None:
    engine = small_engine()
    with pytest.raises(SamplerError) as caught:
        engine.submit(Client("s", 0).request([1, 2], stop_texts=("x",)))
    assert caught.value.field == "stop_texts"
    with pytest.raises(ValueError, match="stop_texts"):
        Client("s", 0).request([1, 2], stop_texts=("",))
