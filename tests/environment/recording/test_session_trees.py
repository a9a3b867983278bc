"""Random trees of conversations: each sampled token is recorded once, in the context it was sampled in."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SamplerError
from tests.environment.recording.recording_builders import (
    ChatClient,
    TellingSampler,
    call_text,
    check_recording,
    make_service,
)
from tests.environment.recording.test_session_map import (
    SYSTEM,
    THOUGHT,
    USER,
    altered,
    result,
    run,
    segments_of,
)

WORDS = ["One.", " two ", f"{THOUGHT}three", "<think>x</think>", "<tool_call>{bad", "é\n\n", "STOP here", ""]


def random_answer(noise: random.Random) -> str:
    text = noise.choice(WORDS) + noise.choice(["", f" {noise.randrange(100)}"])
    for _ in range(noise.choice([0, 0, 1, 2])):
        text += f"\n{call_text(noise.choice('abc'), noise.choice([None, 1, 2]))}"
    return text


class RandomClient:
    """Grows conversations, and does to them what clients do."""

    def __init__(self, client: ChatClient, noise: random.Random) -> None:
        self.client = client
        self.noise = noise
        self.histories: list[list[dict[str, Any]]] = [[SYSTEM, USER]]

    async def step(self) -> None:
        """One or several requests at the same time."""
        count = self.noise.choice([1, 1, 1, 2, 3])
        await asyncio.gather(*(self._ask(self._history()) for _ in range(count)))

    def _history(self) -> list[dict[str, Any]]:
        noise = self.noise
        history = list(noise.choice(self.histories[-3:]))
        action = noise.randrange(10)
        if action == 0:  # another agent
            return [{"role": "system", "content": f"agent {noise.randrange(3)}"}, USER]
        ends = [place for place, one in enumerate(history) if one["role"] in ("user", "tool")]
        if action == 1:  # a step back, or a retry
            return history[: noise.choice(ends) + 1]
        if action == 2 and len(history) > 4:  # compaction
            history = [*history[:2], {"role": "user", "content": "summary"}, *history[-1:]]
        if action == 3 and len(history) > 3:  # an edit
            place = noise.randrange(2, len(history))
            history[place] = {**history[place], "content": f"edited {noise.randrange(9)}"}
        if history[-1]["role"] == "assistant" or noise.random() < 0.3:
            history.append({"role": "user", "content": f"go on {noise.randrange(4)}"})
        return history

    async def _ask(self, history: list[dict[str, Any]]) -> None:
        noise = self.noise
        options: dict[str, Any] = noise.choice(
            [
                {},
                {},
                {},
                {"max_tokens": 7},
                {"stop": ["STOP"]},
                {"temperature": 0.5},
                {"parallel_tool_calls": False},
            ]
        )
        try:
            answer = await self.client.send(history, **options)
        except SamplerError:
            return
        message, *outputs = result(answer, f"out {noise.randrange(3)}")
        how = noise.choice(["", "", "dropped", "trimmed", "json", "blocks", "all"])
        told = altered(message, how) if how else message
        for call, output in zip(told.get("tool_calls") or [], outputs, strict=True):
            output["tool_call_id"] = call["id"]
        self.histories.append([*history, told, *outputs])


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32), keep=st.booleans(), failing=st.booleans())
def test_any_tree_of_conversations_records_each_sampled_token_once(
    seed: int, keep: bool, failing: bool
) -> None:
    noise = random.Random(seed)
    sampler = TellingSampler(lambda context: random_answer(noise), chunk_tokens=noise.choice([1, 3, 0]))
    service = make_service(sampler, keep)
    client = RandomClient(ChatClient(service), noise)

    async def talk() -> None:
        for _ in range(12):
            if failing and noise.random() < 0.2:
                sampler.failures = 1
            if noise.random() < 0.1:
                for branch in service.session_map.branches:
                    sampler.inner.drop_prefix(branch.id)
            await client.step()

    run(talk())
    check_recording(service, sampler)
    assert service.session_map.num_sampled_tokens == client.client.answer_tokens
    for turn in service.session_map.turns():
        segment = next(s for s in service.session_map.segments() if s.id == turn.segment_id)
        assert segment.sampled[turn.start : turn.end].all()


@given(seed=st.integers(0, 1 << 32))
def test_tolerated_alterations_never_open_a_segment(seed: int) -> None:
    noise = random.Random(seed)
    sampler = TellingSampler(lambda context: random_answer(noise) + "x")
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        history = [SYSTEM, USER]
        for _ in range(6):
            message, *outputs = result(await client.send(history))
            told = altered(message, noise.choice(["dropped", "trimmed", "json", "blocks", "all"]))
            for call, output in zip(told.get("tool_calls") or [], outputs, strict=True):
                output["tool_call_id"] = call["id"]
            history += [told, *outputs, {"role": "user", "content": "go on"}]

    run(talk())
    assert len(segments_of(client)) == 1
    check_recording(client.service, sampler)
