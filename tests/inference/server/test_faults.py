"""Concurrent faults of clients and engine leave no state behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from etude.inference.server import KeyLimits, Keys
from etude.inference.server.limits import Key
from tests.inference.server.serving import MODEL, PlayedSampler, Served, make_state, serving, wait_for

TOKEN = "a-token-of-24-characters"


async def one_client(served: Served, http: httpx.AsyncClient, dice: random.Random) -> str:
    """Sends one request of any kind, and perhaps leaves before its answer is complete."""
    stream = dice.random() < 0.5
    body: dict[str, Any] = {"model": MODEL, "n": dice.choice([1, 1, 3]), "stream": stream, "max_tokens": 60}
    body["stop"] = dice.choice([None, "word 7", "never"])
    chat = dice.random() < 0.5
    body["messages" if chat else "prompt"] = [{"role": "user", "content": "Hi"}] if chat else "x"
    headers = {"x-etude-extensions": "tokens"} if dice.random() < 0.5 else {}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    await asyncio.sleep(dice.random() * 0.5)
    try:
        async with asyncio.timeout(dice.choice([0.05, 0.2, 60])):
            async with http.stream("POST", path, json=body, headers=headers) as answer:
                text = (await answer.aread()).decode()
                return f"{answer.status_code} {'error' if 'error' in text else 'whole'}"
    except TimeoutError:
        return "left"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_clients_that_leave_and_engines_that_fail(seed: int) -> None:
    dice = random.Random(seed)
    sampler = PlayedSampler(lambda context: " ".join(f"word {n}" for n in range(12)), pause_s=0.005)
    sampler.failures = [dice.choice(["", "", "", "before", "amid"]) for _ in range(60)]
    key = Key("k", TOKEN, KeyLimits(requests=0))
    state = make_state(sampler, keys=Keys({TOKEN: key}))

    async def everybody(served: Served) -> list[str]:
        header = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=served.url, headers=header, timeout=60) as http:
            clients = [one_client(served, http, random.Random(dice.random())) for _ in range(40)]
            return await asyncio.gather(*clients)

    with serving(state) as served:
        ends = asyncio.run(everybody(served))
        wait_for(lambda: not state.live)
        wait_for(lambda: not sampler.open_sessions)
        assert key.running == 0
        assert set(ends) >= {"200 whole", "left"} and any("error" in end for end in ends), ends
        sampler.failures.clear()
        with served.http(TOKEN) as http:
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
