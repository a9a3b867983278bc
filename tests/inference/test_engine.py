"""The engine computes what the trainer's module computes, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from etude.errors import ConfigError, PrefixMissError, SamplerError
from etude.inference import Engine
from etude.inference.engine import Kernels
from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion
from tests.inference.builders import ALL_KERNELS, Client, drain, empty_engine, prompt, small_engine, version
from tests.model.builders import VOCAB, random_tokens, small_config, small_model


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("prefill_tokens", [1, 3, 10_000])
def test_sessions_of_many_turns_have_the_logprobs_and_routes_of_a_fresh_pass(
    prefill_tokens: int, kernels: Kernels
) -> None:
    model = small_model(1)
    engine = small_engine(model, prefill_tokens=prefill_tokens, kernels=kernels)
    clients = [Client(f"s{i}", i) for i in range(4)]
    for turn in range(3):
        for i, client in enumerate(clients):
            client.ask(engine, prompt(2 + 5 * i + turn, 10 * i + turn), max_tokens=3 + i)
        drain(engine, clients)
    for client in clients:
        client.check(model)
        assert client.misses == 0
    computed = engine.counters.prefill_tokens + engine.counters.decode_tokens
    assert computed == sum(len(client.tokens) - 1 for client in clients), "no position is computed twice"


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_order_of_turns_closings_and_aborts_leaves_every_session_right(data: st.DataObject) -> None:
    model = small_model(2)
    engine = small_engine(model, num_sessions=3, prefill_tokens=data.draw(st.integers(1, 9)))
    clients = {f"s{i}": Client(f"s{i}", i) for i in range(5)}
    waiting: dict[str, str] = {}
    for number in range(data.draw(st.integers(5, 25))):
        name = data.draw(st.sampled_from(sorted(clients)))
        client = clients[name]
        if name in waiting:
            if data.draw(st.booleans()):
                answer = engine.abort(waiting.pop(name))
                assert answer is not None
                for chunk in answer.chunks:
                    client.take(chunk)
        elif data.draw(st.integers(0, 4)) == 0:
            engine.close(name)
            clients[name] = Client(name, number)
        elif len(client.tokens) < 60:
            suffix = prompt(data.draw(st.integers(1, 8)), number)
            waiting[name] = client.ask(engine, suffix, max_tokens=data.draw(st.integers(1, 5))).id
        for answer in engine.step() if engine.has_work else []:
            del waiting[answer.request.session_id]
            for chunk in answer.chunks:
                clients[answer.request.session_id].take(chunk)
    drain(engine, list(clients.values()))
    for client in clients.values():
        if any(client.sampled) and client.finish != "abort":
            client.check(model)


def test_closing_a_session_in_the_middle_moves_the_last_one_whole() -> None:
    model = small_model(3)
    engine = small_engine(model)
    clients = [Client(f"s{i}", i) for i in range(4)]
    for i, client in enumerate(clients):
        client.ask(engine, prompt(3 + 4 * i, i), max_tokens=4 if i != 3 else 12)
    while len(clients[3].tokens) < 3 or any(c.finish is None for c in clients[:3]):
        by_name = {client.name: client for client in clients}
        for answer in engine.step():
            for chunk in answer.chunks:
                by_name[answer.request.session_id].take(chunk)
        if clients[1].finish is not None and engine.num_live_sessions == 4:
            engine.close("s1")
            break
    assert clients[3].finish is None, "the moved session is in the middle of its message"
    drain(engine, clients)
    for client in (clients[0], clients[2], clients[3]):
        client.ask(engine, prompt(4, 50))
    drain(engine, clients)
    for client in (clients[0], clients[2], clients[3]):
        assert client.misses == 0
        client.check(model)
    assert engine.num_live_sessions == 3


def test_more_sessions_than_places_all_come_through_with_prefixes_sent_again() -> None:
    model = small_model(4)
    engine = small_engine(model, num_sessions=2)
    clients = [Client(f"s{i}", i) for i in range(5)]
    for turn in range(3):
        for i, client in enumerate(clients):
            client.ask(engine, prompt(3, 7 * i + turn))
        drain(engine, clients)
    assert sum(client.misses for client in clients) > 0
    for client in clients:
        client.check(model)


def test_a_queued_continuation_keeps_its_place_against_a_new_session() -> None:
    model = small_model(5)
    engine = small_engine(model, num_sessions=1)
    old, new = Client("old", 0), Client("new", 1)
    old.ask(engine, prompt(5, 0))
    drain(engine, [old])
    new.ask(engine, prompt(9, 1))
    old.ask(engine, prompt(4, 2))
    drain(engine, [old, new])
    assert old.misses == 0
    old.check(model)
    new.check(model)


def test_an_evicted_prefix_is_a_miss_and_a_wrong_digest_too() -> None:
    engine = small_engine(num_sessions=1)
    first, second = Client("first", 0), Client("second", 1)
    for client in (first, second):
        client.ask(engine, prompt(5, 0))
        drain(engine, [first, second])
    for request in (first.request([1]), second.request([1], prefix_digest="0" * 16)):
        with pytest.raises(PrefixMissError):
            engine.submit(request)
    assert not engine.has_work


def test_sampling_ends_with_a_stop_token_or_at_a_limit() -> None:
    engine = small_engine(max_tokens=20)
    greedy = {"temperature": 0.0, "max_tokens": 8}
    probe = Client("probe", 0)
    probe.ask(engine, prompt(5, 0), **greedy)
    drain(engine, [probe])
    stop = probe.tokens[8]
    first = probe.tokens.index(stop, 5)
    stopped, limited, full = Client("stopped", 0), Client("limited", 0), Client("full", 0)
    stopped.ask(engine, prompt(5, 0), **greedy, stop_tokens=frozenset({stop}))
    limited.ask(engine, prompt(5, 0), temperature=0.0, max_tokens=2)
    full.ask(engine, prompt(17, 0), temperature=0.0, max_tokens=90)
    drain(engine, [stopped, limited, full])
    assert (stopped.finish, stopped.tokens) == ("stop", probe.tokens[: first + 1])
    assert (limited.finish, limited.tokens) == ("length", probe.tokens[:7])
    assert (full.finish, len(full.tokens)) == ("length", 20)


def test_greedy_takes_the_likeliest_token_and_reports_temperature_one() -> None:
    model = small_model(6)
    engine = small_engine(model)
    client = Client("s", 0)
    client.ask(engine, prompt(9, 0), temperature=0.0, max_tokens=12)
    drain(engine, [client])
    client.check(model)
    for position in range(9, 21):
        alternatives = [
            np.array([*client.tokens[:position], token], dtype=np.int32) for token in range(VOCAB)
        ]
        assert client.tokens[position] == _likeliest(model, alternatives)


def _likeliest(model: LanguageModel, alternatives: list[NDArray[np.int32]]) -> int:
    return int(np.argmax([scores[-1] for scores in score_sequences(model, alternatives)]))


def test_temperature_reports_the_processed_distribution() -> None:
    model = small_model(6)
    engine = small_engine(model)
    client = Client("s", 0)
    client.ask(engine, prompt(9, 0), temperature=0.7, max_tokens=12)
    drain(engine, [client])
    client.check(model, temperature=0.7)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_tokens_depend_on_the_key_and_not_on_the_company(kernels: Kernels) -> None:
    model = small_model(7)
    alone, crowded = small_engine(model, kernels=kernels), small_engine(model, kernels=kernels)
    single, same, other = Client("single", 3), Client("same", 3), Client("other", 4)
    single.ask(alone, prompt(6, 0), max_tokens=20)
    drain(alone, [single])
    other.ask(crowded, prompt(6, 0), max_tokens=20)
    same.ask(crowded, prompt(6, 0), max_tokens=20)
    drain(crowded, [same, other])
    assert same.tokens == single.tokens
    assert other.tokens != single.tokens


def test_requests_that_cannot_be_served_are_refused_and_change_nothing() -> None:
    engine = small_engine(max_tokens=20)
    client = Client("s", 0)
    bad = {
        "suffix": [
            client.request([], suffix=np.zeros(0, dtype=np.int32)),
            client.request([], suffix=random_tokens(20)),
            client.request([], suffix=np.array([VOCAB], dtype=np.int32)),
            client.request([], suffix=np.array([-1], dtype=np.int32)),
        ],
        "version": [
            client.request([1], version=version(1)),
            client.request([1], version=version(1), version_is_minimum=True),
        ],
    }
    for field, requests in bad.items():
        for request in requests:
            with pytest.raises(SamplerError) as caught:
                engine.submit(request)
            assert caught.value.field == field
    assert not engine.has_work
    assert engine.num_live_sessions == 0


def test_a_pinned_version_is_served_by_its_step_and_its_digest() -> None:
    engine = small_engine()
    served = engine.current()
    for pinned in (version(0), served):
        Client(str(pinned.digest), 0).ask(engine, [1, 2], version=pinned)
    with pytest.raises(SamplerError, match="version"):
        Client("x", 0).ask(engine, [1, 2], version=PolicyVersion("run", 0, "0" * 64))
    with pytest.raises(SamplerError, match="version"):
        Client("y", 0).ask(engine, [1, 2], version=PolicyVersion("elsewhere", 0))


def test_a_second_request_of_a_session_is_refused_while_one_is_in_flight() -> None:
    engine = small_engine()
    client = Client("s", 0)
    client.ask(engine, prompt(4, 0))
    for _ in range(2):
        with pytest.raises(SamplerError, match="in flight"):
            engine.submit(Client("s", 1).request([1, 2]))
        engine.step()
    drain(engine, [client])
    client.check(engine.model)


def test_nothing_is_served_before_the_first_activation() -> None:
    engine = empty_engine()
    with pytest.raises(SamplerError, match="no weights"):
        engine.submit(Client("s", 0).request([1, 2]))
    assert engine.version is None


def test_an_abort_gives_what_was_sampled_and_the_session_goes_on() -> None:
    model = small_model(8)
    for steps in range(8):
        engine = small_engine(model, num_sessions=1, prefill_tokens=4)
        client = Client("s", 0)
        request = client.ask(engine, prompt(10, 0), max_tokens=30)
        for _ in range(steps):
            assert engine.step() == []
        _take_abort(engine, client, request.id)
        assert len(client.tokens) == 10 + max(0, steps - 2)
        assert not engine.has_work
        client.ask(engine, prompt(3, 1))
        drain(engine, [client])
        client.check(model)


def test_aborting_a_queued_or_unknown_request_touches_no_other() -> None:
    model = small_model(8)
    engine = small_engine(model, num_sessions=1)
    running, queued = Client("running", 0), Client("queued", 1)
    running.ask(engine, prompt(5, 0))
    engine.step()
    request = queued.ask(engine, prompt(5, 1))
    engine.step()
    assert engine.abort("unknown") is None
    _take_abort(engine, queued, request.id)
    assert len(queued.tokens) == 5
    drain(engine, [running])
    assert engine.abort(request.id) is None
    running.check(model)
    queued.ask(engine, [])
    drain(engine, [queued])
    queued.check(model)


def _take_abort(engine: Engine, client: Client, request_id: str) -> None:
    answer = engine.abort(request_id)
    assert answer is not None
    for chunk in answer.chunks:
        client.take(chunk)
    assert client.finish == "abort"


def test_sessions_beyond_the_models_positions_are_refused() -> None:
    config = small_config(max_positions=64)
    Engine(config, VOCAB, 2, 65)
    with pytest.raises(ConfigError, match="64 positions"):
        Engine(config, VOCAB, 2, 66)
