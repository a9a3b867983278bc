"""Étude's own agent behind an endpoint of ours, whose model knows less tools than the agent offers."""

from __future__ import annotations

import asyncio

import numpy as np

from etude.agent import registry_named
from etude.agent.endpoint import Endpoint, EndpointSampler, endpoint_renderer
from etude.agent.prompts import SYSTEM_PROMPT, own_control_tokens
from etude.inference.server import ServedModel
from etude.records import SampleRequest, SamplingParams, ToolCall
from etude.tokens import Renderer, train_tokenizer
from etude.tokens.chat_format import choose_format
from etude.tokens.grammar import XmlGrammar
from tests.environment.recording.recording_builders import TEXTS
from tests.inference.server.serving import MODEL, PlayedSampler, make_state, serving

CALL = ToolCall("read_file", {"path": "lib/tally.py"})


def test_a_model_with_tags_of_its_own_answers_an_agent_that_offers_all_tools() -> None:
    controls = own_control_tokens()
    tokenizer = train_tokenizer(TEXTS, 256 + len(controls) + 20, controls)
    renderers = choose_format(tokenizer).renderers()
    ends = frozenset((tokenizer.control_id("<|end|>"),))
    model = ServedModel(MODEL, tokenizer, ends, 767, renderers)
    schemas = registry_named("full").schemas
    own = Renderer(tokenizer, XmlGrammar(registry_named("core").schemas))
    sampler = PlayedSampler(tokens=lambda context: own.message([CALL]))
    renderer = endpoint_renderer(schemas)
    request = SampleRequest(
        id="1",
        session_id="s",
        suffix=renderer.prompt("Fix lib/tally.py.", SYSTEM_PROMPT),
        params=SamplingParams(max_tokens=4096),
        stop_tokens=frozenset((renderer.end_token,)),
        rng_key=(0,),
    )

    async def ask(url: str) -> list[ToolCall]:
        agent = EndpointSampler(Endpoint(f"{url}/v1", MODEL), renderer, schemas)
        try:
            chunks = [chunk async for chunk in agent.stream(request)]
        finally:
            await agent.aclose()
        return renderer.parse(np.concatenate([chunk.tokens for chunk in chunks]))

    with serving(make_state(sampler, model=model)) as served:
        assert asyncio.run(ask(served.url)) == [CALL]
    shown = tokenizer.decode(sampler.requests[0].suffix)
    assert SYSTEM_PROMPT in shown and "JSON" not in shown, "the tools are not told: it was trained with them"
