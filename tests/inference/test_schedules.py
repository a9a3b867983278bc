"""Any arrival order and number of pages gives the same tokens as a session alone, and leaks no page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference import Answer, Engine, MtpDrafts, NgramLookup
from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from tests.inference.builders import Client, drain, fresh_routes, needs_compiler, prompt, serve, small_engine
from tests.inference.invariants import check_engine
from tests.model.builders import draft_layers, small_model

MAX_TOKENS = 80
MODELS = [small_model(seed) for seed in (2, 3, 4)]
DRAFTS = [
    None,
    NgramLookup(3, longest=1, shortest=1),
    MtpDrafts(draft_layers(MODELS[0]), 3),
    MtpDrafts(draft_layers(MODELS[0], 2), 2),
]


@dataclass
class _Schedule:
    """Plays random actions, and keeps books of what every message was asked with."""

    engine: Engine
    data: st.DataObject
    clients: dict[str, Client] = field(default_factory=dict[str, Client])
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    asked: dict[str, list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    """Per client: length of the context and parameters of each message that ran to its end."""
    finished: list[Client] = field(default_factory=list[Client])

    def act(self, number: int) -> None:
        name = f"s{self.data.draw(st.integers(0, 5))}"
        client = self.clients.setdefault(name, Client(f"{name}", 1000 + number))
        if name in self.waiting:
            if self.data.draw(st.integers(0, 3)) == 0:
                self.take(self.engine.abort(self.waiting[name]))
        elif self.data.draw(st.integers(0, 5)) == 0:
            self.engine.close(name)
            self.finished.append(self.clients.pop(name))
        elif len(client.tokens) < 50:
            # Few seeds, so that prompts share beginnings.
            suffix = prompt(self.data.draw(st.integers(1, 40)), self.data.draw(st.integers(0, 1)))
            room = MAX_TOKENS - 1 - len(client.tokens)
            options = {
                "max_tokens": self.data.draw(st.integers(1, 20)),
                "streaming": self.data.draw(st.booleans()),
            }
            self.waiting[name] = client.ask(self.engine, suffix[:room], **options).id
        for _ in range(self.data.draw(st.integers(0, 3))):
            self.step()

    def step(self) -> None:
        if self.engine.has_work:
            for answer in self.engine.step(self.data.draw(st.sampled_from([1, 3, 64]))):
                self.take(answer)
        check_engine(self.engine)

    def take(self, answer: Answer | None) -> None:
        assert answer is not None
        client = self.clients[answer.request.session_id]
        for chunk in answer.chunks:
            client.take(chunk)
        if answer.is_last:
            del self.waiting[answer.request.session_id]

    def end(self) -> list[Client]:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "everything comes to its end"
        return [*self.finished, *self.clients.values()]


def _alone(model: LanguageModel, client: Client, kernels: str) -> list[float]:
    """Log-probabilities of a client's tokens when each message is sampled alone, from nothing; asserts that
    the tokens are the same."""
    logprobs = [0.0] * len(client.tokens)
    for start, end in _messages(client):
        engine = small_engine(model, num_sessions=1, max_tokens=MAX_TOKENS, kernels=kernels)  # type: ignore[arg-type]
        alone = Client("alone", client._key)
        alone.ask(engine, client.tokens[:start], max_tokens=end - start)
        drain(engine, [alone])
        assert alone.tokens[start:] == client.tokens[start:end]
        logprobs[start:end] = alone.logprobs[start:]
    return logprobs


def _messages(client: Client) -> list[tuple[int, int]]:
    """First and last-but-one position of each sampled run."""
    edges = np.flatnonzero(np.diff(np.array([False, *client.sampled, False]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _draw_engine(data: st.DataObject, kernels: Any) -> Engine:
    return small_engine(
        MODELS[0],
        num_sessions=data.draw(st.integers(2, 6)),
        max_tokens=MAX_TOKENS,
        prefill_tokens=data.draw(st.sampled_from([3, 20, 256])),
        kernels=kernels,
        num_pages=data.draw(st.integers(5, 16)),
        drafts=data.draw(st.sampled_from(DRAFTS)),
    )


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_schedule_gives_every_message_the_bits_that_it_has_alone(data: st.DataObject) -> None:
    schedule = _Schedule(_draw_engine(data, "native"), data)
    for number in range(data.draw(st.integers(5, 30))):
        schedule.act(number)
    for client in schedule.end():
        alone = _alone(MODELS[0], client, "native")
        assert np.array(client.logprobs)[client.sampled].tolist() == np.array(alone)[client.sampled].tolist()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_schedule_with_weight_updates_scores_every_token_as_its_version_does(data: st.DataObject) -> None:
    schedule = _Schedule(_draw_engine(data, "eager"), data)
    step = 0
    for number in range(data.draw(st.integers(5, 30))):
        schedule.act(number)
        if data.draw(st.integers(0, 6)) == 0:
            step += 1
            serve(schedule.engine, MODELS[step % 3], step, "recompute")
            check_engine(schedule.engine)
    for client in schedule.end():
        _check_versions(client)


def _check_versions(client: Client) -> None:
    if not any(client.sampled):
        return
    tokens = np.array(client.tokens, dtype=np.int32)
    scores = [score_sequences(model, [tokens])[0] for model in MODELS]
    for position, version in client.versions.items():
        assert client.kv_oldest[position] == version
        expected = scores[version.step % 3][position]
        assert abs(client.logprobs[position] - expected) < 1e-4, (position, version)
    if client.finish in ("stop", "length"):
        last = client.versions[max(client.versions)]
        routes = np.stack([client.routes[position] for position in range(len(tokens) - 1)])
        np.testing.assert_array_equal(routes, fresh_routes(MODELS[last.step % 3], tokens)[:-1])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_kept_keys_stay_their_sessions_own_and_new_sessions_see_only_the_new(data: st.DataObject) -> None:
    engine = _draw_engine(data, "eager")
    schedule = _Schedule(engine, data)
    step = 0
    for number in range(data.draw(st.integers(5, 25))):
        schedule.act(number)
        if data.draw(st.integers(0, 4)) == 0:
            step += 1
            serve(engine, MODELS[step % 3], step, "keep")
            check_engine(engine)
    clients = schedule.end()
    for client in clients:
        for position, version in client.versions.items():
            assert client.kv_oldest[position].step <= version.step
    for name in list(schedule.clients):
        engine.close(name)
    late = Client("late", 7)
    late.ask(engine, prompt(40, 0))
    drain(engine, [late])
    assert {v.step for v in late.kv_oldest.values()} == {step}
    late.check(MODELS[step % 3])
    check_engine(engine)


@pytest.mark.parametrize("kernels", ["eager", pytest.param("native", marks=needs_compiler)])
def test_the_youngest_gives_way_and_comes_back_with_the_same_tokens(kernels: Any) -> None:
    model = MODELS[0]
    engine = small_engine(model, num_sessions=4, max_tokens=64, kernels=kernels, num_pages=6)
    clients = [Client(f"s{i}", i) for i in range(3)]
    for i, client in enumerate(clients):
        client.ask(engine, prompt(10, 20 + i), max_tokens=40)
    drain(engine, clients)
    check_engine(engine)
    assert engine.counters.preemptions > 0
    for client in clients:
        client.check(model)
        assert len(client.tokens) == 50
        alone = Client("alone", int(client.name[1:]))
        single = small_engine(model, max_tokens=64, kernels=kernels)
        alone.ask(single, client.tokens[:10], max_tokens=40)
        drain(single, [alone])
        assert alone.tokens == client.tokens
    assert clients[0].misses == 0
