"""Each answer reports how many input tokens were cached."""

from __future__ import annotations

from etude.inference import Engine
from etude.records import SampleRequest, SamplingParams
from tests.inference.builders import small_engine
from tests.model.builders import random_tokens

LENGTH = 50


def ask(engine: Engine, name: str, session: str, suffix: int, digest: str | None = None) -> tuple[int, str]:
    """Sends the first tokens of a prompt; what the first chunk tells, and the digest at the end."""
    tokens = random_tokens(LENGTH)[:suffix]
    params = SamplingParams(max_tokens=5)
    request = SampleRequest(name, session, tokens, params, frozenset(), (1,), digest, streaming=True)
    engine.submit(request)
    answers = [answer for _ in range(40) if engine.has_work for answer in engine.step()]
    chunks = [chunk for answer in answers for chunk in answer.chunks if answer.request.id == name]
    told = [chunk.cached_tokens for chunk in chunks]
    assert told[0] is not None and told[1:] == [None] * (len(told) - 1) and len(told) == 5
    return told[0], chunks[-1].prefix_digest


def test_the_first_chunk_tells_what_the_request_found_computed() -> None:
    engine = small_engine()
    first, digest = ask(engine, "r1", "a", LENGTH)
    assert first == 0
    assert ask(engine, "r2", "b", LENGTH)[0] == 48, "another session's prompt: whole pages of 16 tokens"
    assert ask(engine, "r3", "a", 7, digest)[0] == LENGTH + 4, "its own, but for the last sampled token"
    assert ask(engine, "r4", "a", 32)[0] == 31
