"""Requests that survive the loss of their engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
from benchmarks.simulation.virtual_time import run_virtual

from etude.controller.remote.patient import PatientSampler
from etude.errors import SamplerError
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams

VERSION = PolicyVersion("run", 0, "digest")
TOKENS = np.arange(3, dtype=np.int32)
PATIENCE_S = 300.0


class Engine:
    """A RemoteEngine that dies with its first requests, each after a while, and then samples."""

    name = "engine-0"

    def __init__(self, *lives_s: float) -> None:
        self._lives_s = list(lives_s)

    def current(self) -> PolicyVersion:
        return VERSION

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open."""

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        if self._lives_s:
            await asyncio.sleep(self._lives_s.pop(0))
            raise SamplerError("the engine is lost")
        logprobs = np.zeros(3, dtype=np.float32)
        yield SampleChunk(TOKENS, logprobs, VERSION, VERSION, finish="length", prefix_digest="d")


async def sampled(*lives_s: float) -> list[int]:
    sampler = PatientSampler(PATIENCE_S)
    sampler.add_engine(cast(Any, Engine(*lives_s)))
    request = SampleRequest("r", "s", TOKENS, SamplingParams(max_tokens=3), frozenset(), (0,))
    return [token async for chunk in sampler.stream(request) for token in chunk.tokens.tolist()]


def test_a_request_that_was_sampled_for_longer_than_its_patience_waits_for_another_engine() -> None:
    assert run_virtual(sampled(2 * PATIENCE_S)) == [0, 1, 2]


def test_one_whose_engines_die_again_and_again_gives_up() -> None:
    with pytest.raises(SamplerError, match="lost"):
        run_virtual(sampled(*[PATIENCE_S / 4] * 8))
