"""The server over a real engine: what it serves is what the engine samples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from etude.inference import Answer, Engine, EngineService
from etude.inference.server import ServerState, admin, build_app, loan_routes, routes
from etude.inference.server.checkpoints import CheckpointWeights, checkpoint_manifest
from etude.inference.server.client import WANT_TOKENS, SideChannelClient
from etude.model import build_model
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion
from etude.weights import MemoryWeights
from etude.weights.documents import manifest_document
from tests.cli.commands import etude, option_names
from tests.environment.recording.recording_builders import OPENAI_TOOLS, qwen_tokenizer
from tests.inference.server.checkpoint import serve_process, write_checkpoint
from tests.inference.server.serving import ADMIN, MODEL, Served, qwen_model, serving, wait_for
from tests.model.builders import small_config

openai = pytest.importorskip("openai", reason="the openai client is not installed")

CONTEXT = 1199
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Fix lib/tally.py, then run its tests."}]


def make_app(state_of: list[ServerState], engine_type: type[Engine] = Engine) -> FastAPI:
    """An application whose engine lives in a thread beside the server's loop."""
    tokenizer = qwen_tokenizer()
    config = small_config(max_positions=CONTEXT + 1)
    model = build_model(config, tokenizer.vocab_size)
    model.initialise(0)
    memory = MemoryWeights()
    weights = CheckpointWeights(config, memory)
    engine = engine_type(config, tokenizer.vocab_size, 8, CONTEXT + 1)
    service = EngineService(engine, weights.fetch, None)
    state = ServerState(
        qwen_model(CONTEXT), service, service, admin_token=ADMIN, failure=lambda: service.failure
    )
    app = build_app(state)
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service, inner(app):
            manifest = memory.publish(PolicyVersion("tiny", 0), dict(model.named_parameters()))
            await service.stage(manifest)
            await service.activate(manifest.version)
            yield

    app.router.lifespan_context = lifespan
    state_of.append(state)
    return app


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    states: list[ServerState] = []
    app = make_app(states)
    with serving(states[0], app) as running:
        yield running


def engine_of(served: Served) -> Engine:
    service = served.state.sampler
    assert isinstance(service, EngineService)
    return service.engine


def chat(served: Served, **options: Any) -> Any:
    base = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "seed": 3}
    return served.openai().chat.completions.create(**(base | options))


def test_an_answer_is_what_the_model_samples_with_its_logprobs_and_routes(served: Served) -> None:
    answer = chat(served, extra_headers=WANT_TOKENS, logprobs=True)
    with SideChannelClient(served.url) as channel:
        (found,) = channel.fetch(answer.id)
    whole = np.concatenate([found.prompt, found.tokens])
    scores = score_sequences(engine_of(served).model, [whole])[0][len(found.prompt) :]
    np.testing.assert_allclose(found.logprobs, scores, atol=1e-5)
    rows = [row.logprob for row in answer.choices[0].logprobs.content]
    assert rows == pytest.approx(found.logprobs.tolist(), abs=1e-7)
    assert found.routes is not None and found.routes.shape == (len(whole) - 1, 2, 2)
    assert found.routes.max() < 4 and {span.version.lineage for span in found.spans} == {"tiny"}


def test_the_same_seed_gives_the_same_answer_streamed_or_not(served: Served) -> None:
    one, other = chat(served), chat(served)
    chunks = list(chat(served, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert one.choices[0].message.content == other.choices[0].message.content == text
    assert chat(served, seed=4).choices[0].message.content != text


def test_chunks_come_while_the_engine_steps(served: Served) -> None:
    chunks = list(chat(served, stream=True, max_tokens=200, temperature=2.0))
    assert len(chunks) > 20


def test_samples_share_the_prefill_of_their_prompt(served: Served) -> None:
    engine = engine_of(served)
    before = engine.counters.prefill_tokens
    answer = chat(served, messages=[{"role": "user", "content": "An own long prompt. " * 12}], n=4)
    prompt = answer.usage.prompt_tokens
    assert prompt > 100
    assert engine.counters.prefill_tokens - before < 2 * prompt
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_second_turn_computes_only_what_is_new(served: Served) -> None:
    engine = engine_of(served)
    history = [{"role": "user", "content": "Turn one of two. " * 12}]
    first = chat(served, messages=history, tools=OPENAI_TOOLS)
    told = first.choices[0].message.model_dump(exclude_none=True)
    before = engine.counters.prefill_tokens
    history = [*history, told, {"role": "user", "content": "Go on."}]
    second = chat(served, messages=history, tools=OPENAI_TOOLS)
    computed = engine.counters.prefill_tokens - before
    assert second.usage.prompt_tokens > first.usage.prompt_tokens > 100
    assert computed < second.usage.prompt_tokens - first.usage.prompt_tokens + 20


def test_what_the_engine_found_by_itself_is_told(served: Served) -> None:
    """The words of an answer are encoded anew in the next prompt: the session's own tokens may not fit."""
    client, prompt, told = served.openai(), "Some words of a prompt that is long. " * 8, list[int]()
    for _ in range(3):
        answer = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=20,
            seed=1,
            temperature=2.0,
        )
        told.append(answer.usage.prompt_tokens_details.cached_tokens)
        before, prompt = answer.usage.prompt_tokens, prompt + answer.choices[0].text + " Go on. "
    assert told[0] == 0 and told[1] > 64 and told[2] > before - 64


def test_greedy_sampling_and_truncated_sampling_are_served(served: Served) -> None:
    greedy = [chat(served, temperature=0, seed=seed).choices[0].message.content for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    top = chat(served, logprobs=True, top_logprobs=3, temperature=0.8, extra_body={"top_k": 3, "min_p": 0.01})
    for row in top.choices[0].logprobs.content:
        assert 1 <= len(row.top_logprobs) <= 3
        assert sum(np.exp(one.logprob) for one in row.top_logprobs) == pytest.approx(1, abs=1e-3)
        assert row.logprob in [pytest.approx(one.logprob, abs=1e-5) for one in row.top_logprobs]


def test_a_client_that_leaves_frees_the_engine(served: Served) -> None:
    stream = chat(served, stream=True, max_tokens=500, temperature=2.0)
    next(iter(stream))
    stream.close()
    wait_for(lambda: not served.state.live)
    wait_for(lambda: engine_of(served).num_running + engine_of(served).num_waiting == 0)


def test_a_version_swapped_in_mid_answer_is_told_token_by_token(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, is_swapped = Engine.step, threading.Event()

    def slow(engine: Engine, most_steps: int = 1) -> list[Answer]:
        return step(engine, most_steps if is_swapped.wait(0.05) else 1)

    monkeypatch.setattr(Engine, "step", slow)
    other = write_checkpoint(tmp_path / "next", seed=1, max_positions=CONTEXT + 1)
    manifest = checkpoint_manifest(other, PolicyVersion("tiny", 1))
    client = served.openai()
    with served.http(ADMIN) as admin:
        body = {"manifest": manifest_document(manifest)}
        assert admin.post("/admin/weights/stage", json=body).status_code == 200
        stream = client.completions.create(
            model=MODEL,
            prompt="x",
            max_tokens=550,
            stream=True,
            temperature=2.0,
            seed=2,  # with the first version, one that samples no end of the answer in all of these tokens
            extra_headers=WANT_TOKENS,
        )
        identity = next(iter(stream)).id
        version = {"version": json.loads(json.dumps(body))["manifest"]["version"]}
        assert admin.post("/admin/weights/activate", json=version).status_code == 200
        is_swapped.set()
        for _ in stream:
            pass
        assert admin.get("/ready").json()["version"] == "tiny@1"
        bad = {"manifest": {**body["manifest"], "url": "file:/nowhere"}}
        refused = admin.post("/admin/weights", json=bad)
        assert (refused.status_code, admin.get("/ready").json()["version"]) == (400, "tiny@1")
        with SideChannelClient(served.url) as channel:
            (found,) = channel.fetch(identity)
    steps = [span.version.step for span in found.spans]
    assert steps == sorted(steps) and steps[-1] == 1
    assert found.spans[-1].end == len(found.tokens)


def test_many_clients_at_once_are_all_answered(served: Served) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> int:
        body = {"prompt": f"Number {number % 5}", "max_tokens": 1 + number, "seed": number}
        answer = await client.post("/v1/completions", json=body)
        return answer.json()["usage"]["completion_tokens"]

    async def all_of_them() -> list[int]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(30)))

    found = asyncio.run(all_of_them())
    assert all(1 <= count <= 1 + number for number, count in enumerate(found))


PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
_SILENT = (0, 2)
"""Examples that print nothing: a checkpoint is made, a conversation goes on."""


def test_every_option_and_path_on_the_page_exists() -> None:
    known = option_names("serve") | option_names("agent")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known
    paths = set(re.findall(r"`(?:GET |POST )?(/[a-z0-9_/]+)", PAGE))
    routers = (routes.router, admin.router, loan_routes.router)
    routed = {getattr(route, "path", "") for one in routers for route in one.routes}
    routed |= {"/health", "/ready", "/metrics"}
    named = {re.sub(r"\{.*", "", path).rstrip("/") for path in routed}
    assert {path.rstrip("/") for path in paths} <= named and len(EXAMPLES) == 5


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_page_run(
    served: Served,
    tmp_path: Path,
    number: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    following = write_checkpoint(tmp_path / "next", seed=2, max_positions=CONTEXT + 1)
    code = EXAMPLES[number].replace("http://127.0.0.1:8660", served.url).replace("ADMIN_TOKEN", ADMIN)
    code = code.replace('model="final"', f'model="{MODEL}"').replace("checkpoints/next", str(following))
    exec(compile(code, f"docs/serving.md, example {number}", "exec"), {})
    assert capsys.readouterr().out or number in _SILENT


class HeldEngine(Engine):
    """Its first step with news is followed by one that takes until it may go on."""

    held, go_on = threading.Event(), threading.Event()
    has_answered = False

    def step(self, most_steps: int = 1) -> list[Answer]:
        if self.has_answered:
            self.held.set()
            assert self.go_on.wait(60.0)
        answers = super().step(most_steps)
        self.has_answered = bool(answers)
        return answers


class WaitingEngine(Engine):
    """Takes a step only once the client has read what the one before sampled."""

    read = threading.Semaphore(1)

    def step(self, most_steps: int = 1) -> list[Answer]:
        assert self.read.acquire(timeout=60.0), "the client has not got the last token"
        return super().step(most_steps)


class FailingEngine(Engine):
    """Dies at its first step."""

    def step(self, most_steps: int = 1) -> list[Answer]:
        raise RuntimeError("out of memory")


def test_a_long_step_delays_no_other_request() -> None:
    states: list[ServerState] = []
    app = make_app(states, HeldEngine)
    with serving(states[0], app) as served, served.http() as http:
        stream = chat(served, stream=True, max_tokens=20)
        next(iter(stream))
        assert HeldEngine.held.wait(60.0)
        for _ in range(5):
            assert http.get("/health").status_code == 200
            assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        HeldEngine.go_on.set()
        stream.close()
        wait_for(lambda: not served.state.live)


def test_every_token_leaves_before_the_next_is_computed() -> None:
    states: list[ServerState] = []
    app = make_app(states, WaitingEngine)
    with serving(states[0], app) as served:
        stream = served.openai().completions.create(
            model=MODEL, prompt="x", max_tokens=30, seed=3, temperature=2.0, logprobs=0, stream=True
        )
        sampled = 0
        for chunk in stream:
            if chunk.choices[0].finish_reason is None:
                sampled += 1
                WaitingEngine.read.release()
    assert sampled > 10


def test_an_engine_that_fails_for_good_is_told_by_health_and_readiness() -> None:
    states: list[ServerState] = []
    app = make_app(states, FailingEngine)
    with serving(states[0], app) as served, served.http() as http:
        for _ in range(2):
            answer = http.post("/v1/completions", json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert (http.get("/health").status_code, http.get("/ready").status_code) == (500, 503)


@pytest.mark.slow
def test_the_command_serves_a_checkpoint_until_it_is_told_to_end(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:a-token-of-24-characters\n")
    tokens.chmod(0o600)
    options = ("--tokens-file", str(tokens), "--kernels", "eager", "--cache-mib", "16", "--drain-s", "5")
    with serve_process(checkpoint, *options) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="a-token-of-24-characters", max_retries=0)
        assert [model.id for model in client.models.list().data] == ["tiny"]
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8)
        assert 1 <= answer.usage.completion_tokens <= 8
        text = httpx.get(f"{served.url}/metrics", timeout=60).text
        assert "etude_engine_decode_tokens" in text
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert served.end() == 0


@pytest.mark.slow
def test_the_command_refuses_what_it_cannot_serve(tmp_path: Path) -> None:

    write_checkpoint(tmp_path / "tiny")
    for arguments, words in (
        ([str(tmp_path)], "is not a model directory"),
        ([str(tmp_path / "tiny"), "--host", "0.0.0.0"], "no keys"),
        ([str(tmp_path / "tiny"), "--kernels", "fast"], "is not one of"),
        ([str(tmp_path / "tiny"), "--max-context", "100000"], "longest sequence"),
        ([str(tmp_path / "tiny"), "--template", "etude"], "control token"),
    ):
        result = etude("serve", *arguments)
        assert result.exit_code == 2 and words in result.stderr, result.stderr
