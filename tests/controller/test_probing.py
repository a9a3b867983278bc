"""The probe samples as many tokens as a scripted author's session, and only in runs of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from etude.config import RunConfig
from etude.controller.probing import ScriptedSampler, can_probe
from etude.protocols import Sampler
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams

VERSION = PolicyVersion("probe", 0)


class Counting:
    """Samples zeros, three at a time."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []
        self.open = self.close = self.abort = lambda _: None

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        self.asked.append(request)
        left = request.params.max_tokens
        while left:
            count = min(3, left)
            left -= count
            tokens, logprobs = np.zeros(count, np.int32), np.full(count, -1.0, np.float32)
            yield SampleChunk(tokens, logprobs, VERSION, VERSION, finish=None if left else "length")


def answer(sampler: ScriptedSampler, request: SampleRequest) -> tuple[list[int], str | None]:
    async def collect() -> list[SampleChunk]:
        return [chunk async for chunk in sampler.stream(request)]

    chunks = asyncio.run(collect())
    return [int(token) for chunk in chunks for token in chunk.tokens], chunks[-1].finish


def test_the_engine_samples_as_many_tokens_as_the_author_wrote() -> None:
    engine = Counting()
    messages = [np.arange(5, dtype=np.int32), np.arange(9, dtype=np.int32)]
    sampler = ScriptedSampler(cast(Sampler, engine), messages)
    request = SampleRequest(
        "r", "s", np.ones(4, np.int32), SamplingParams(max_tokens=7), frozenset({0}), (1,)
    )
    assert answer(sampler, request) == ([0, 1, 2, 3, 4], "stop")
    assert answer(sampler, request) == ([0, 1, 2, 3, 4, 5, 6], "length"), "cut where an agent's would be"
    assert answer(sampler, request) == ([0] * 7, "length"), "then the engine's own"
    assert [one.params.max_tokens for one in engine.asked] == [5, 7, 7]
    assert [bool(one.stop_tokens) for one in engine.asked] == [False, False, True]
    assert engine.asked[2] == replace(request)


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"executor": "ray"},
        {"colocated": True},
        {"parallel": {"ranks": 2}},
        {"engine": {"backend": "vllm", "vllm": {"url": "http://127.0.0.1:1"}}},
    ],
)
def test_only_a_run_of_this_process_is_probed(elsewhere: dict[str, Any]) -> None:
    here = {"device": "cpu"}
    assert can_probe(RunConfig.model_validate(here))
    assert not can_probe(RunConfig.model_validate(here | elsewhere))
