"""What a replica asks of its vLLM beside sampling: what it can do, and how likely it finds given tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.inference.vllm.answers import Part, read_part
from etude.inference.vllm.client import VllmClient
from etude.inference.vllm.servers import ADAPTERS


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the worker extension says of its vLLM."""

    dtype: str
    max_tokens: int
    vocab_size: int
    captures: bool
    """Whether routes are to be had from `etude_take_routes`."""
    adapters: str | None
    """What requests name as their model where it serves adapters; else they name none."""


async def greet(client: VllmClient, *, capture_routes: bool) -> Abilities:
    """Prepares a server's workers. Raises SamplerError if they lack our extension."""
    answer = await client.call_workers("etude_prepare", "yes" if capture_routes else "no")
    if not isinstance(answer, dict) or "dtype" not in answer:
        raise SamplerError(
            "vLLM's workers lack Étude's extension",
            field="engine.vllm",
            received=answer,
            fix="start it with --worker-extension-cls etude_vllm_worker.EtudeWorker",
        )
    return Abilities(
        str(answer["dtype"]),
        int(answer["max_tokens"]),
        int(answer["vocab_size"]),
        bool(answer["captures"]),
        ADAPTERS if answer["adapts"] else None,
    )


async def score_tokens(
    client: VllmClient, tokens: NDArray[np.int32], name: str, adapters: str | None, timeout_s: float
) -> Part:
    """vLLM's own log-probabilities of `tokens` [T], none of which it takes from its cache; the request is
    called `name`, if that is not empty. `adapters`: see Abilities. Raises SamplerError."""
    body = {
        "model": adapters,
        "request_id": name or f"etude-{uuid4().hex}",
        "token_ids": tokens.tolist(),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
        },
        "cache_salt": uuid4().hex,
    }
    try:
        async with asyncio.timeout(timeout_s):
            part = read_part(await client.generate(body), 0)
    except TimeoutError:
        raise SamplerError("vLLM did not score in time", received=f"{timeout_s:g} s") from None
    if part.prompt_logprobs is None or len(part.prompt_logprobs) != len(tokens):
        raise SamplerError("vLLM did not score the tokens", received=part.finish)
    return part
