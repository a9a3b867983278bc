"""Keys, their limits, the server's measurement, and weights by the administrator."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.errors import ConfigError
from etude.inference.server import KeyLimits, Keys, check_address, read_keys, serve
from etude.inference.server.errors import RateLimitError
from etude.inference.server.limits import Key
from etude.inference.server.state import serve_metrics
from etude.records import PolicyVersion, TensorEntry, WeightManifest
from etude.serving.listening import open_listeners
from etude.weights.documents import manifest_document
from tests.inference.server.serving import (
    ADMIN,
    MODEL,
    PlayedSampler,
    PlayedSink,
    Served,
    make_state,
    replies,
    serving,
    wait_for,
)

openai = pytest.importorskip("openai", reason="the openai client is not installed")

ALICE, BOB = "alice-token-of-24-chars", "bobs-token-of-24-chars-"


def keys(**limits: Any) -> Keys:
    return Keys({ALICE: Key("alice", ALICE, KeyLimits(**limits)), BOB: Key("bob", BOB, KeyLimits())})


@pytest.fixture
def sampler() -> PlayedSampler:
    return PlayedSampler(lambda context: "Some words.")


def complete(served: Served, token: str, **options: Any) -> Any:
    client = served.openai(token or "unused")
    return client.completions.create(**({"model": MODEL, "prompt": "x", "max_tokens": 50} | options))


def test_without_a_known_key_nothing_opens(sampler: PlayedSampler) -> None:
    with serving(make_state(sampler, keys=keys())) as served:
        assert complete(served, ALICE).choices[0].text == "Some words."
        for token in ("wrong", "é"):
            with served.http() as http:
                header = {"authorization": f"Bearer {token}".encode()}
                for path in ("/v1/completions", "/tokenize"):
                    assert http.post(path, headers=header, json={"prompt": "x"}).status_code == 401
                for path in ("/v1/models", "/v1/side_channel/x"):
                    assert http.get(path, headers=header).status_code == 401
                assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3


def test_a_key_runs_only_so_many_at_once(sampler: PlayedSampler) -> None:
    sampler.answers, sampler.pause_s = (lambda context: "word " * 100), 600.0
    with serving(make_state(sampler, keys=keys(requests=2))) as served:
        stream = complete(served, ALICE, stream=True, max_tokens=900, n=2)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            complete(served, ALICE)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        sampler.answers, sampler.pause_s = (lambda context: "x"), 0.0
        assert complete(served, BOB).choices[0].text == "x", "others go on"
        stream.close()
        wait_for(lambda: not served.state.live)
        assert complete(served, ALICE).choices[0].text == "x"
        # Waiting would not help: nothing that clients try again.
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            complete(served, ALICE, n=3)


def test_tokens_of_a_minute_are_counted_and_given_back_with_time() -> None:
    now = [0.0]
    key = Key("a", "t", KeyLimits(requests=0, tokens_per_minute=60), lambda: now[0])
    key.begin_requests(1)
    key.charge(90)
    with pytest.raises(RateLimitError) as caught:
        key.begin_requests(1)
    assert caught.value.retry_after_s == pytest.approx(31)
    now[0] = 29.0
    with pytest.raises(RateLimitError):
        key.begin_requests(1)
    now[0] = 31.5
    key.begin_requests(1)
    now[0] = 1e6
    key.begin_requests(1)
    key.charge(60)
    with pytest.raises(RateLimitError):
        key.begin_requests(1)


def test_a_full_server_says_so(sampler: PlayedSampler) -> None:
    sampler.pause_s = 600.0
    with serving(make_state(sampler, requests=1)) as served:
        stream = complete(served, "", stream=True)
        next(iter(stream))
        with pytest.raises(openai.InternalServerError) as caught:
            complete(served, "")
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "2")
        stream.close()


def tokens_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_tokens_file_names_keys_and_their_limits(tmp_path: Path) -> None:
    text = f"# who\nalice:{ALICE}\n\nbob:{BOB} requests=3 tokens_per_minute=0\n"
    found = read_keys(tokens_file(tmp_path / "t", text), KeyLimits(7, 1000))
    assert (found.find(ALICE).name, found.find(ALICE).limits) == ("alice", KeyLimits(7, 1000))
    assert found.find(BOB).limits == KeyLimits(3, 0)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("", 0o600, "no token"),
        (f"alice:{ALICE}", 0o644, "chmod 600"),
        ("alice:short", 0o600, "16 characters"),
        (f"alice {ALICE}", 0o600, "NAME:TOKEN"),
        (f"alice:{ALICE} speed=3", 0o600, "no such limit"),
        (f"alice:{ALICE}\nalice:{BOB}", 0o600, "twice"),
    ],
)
def test_a_bad_tokens_file_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys(tokens_file(tmp_path / "t", text, mode), KeyLimits())
    assert ALICE not in str(caught.value), "tokens are not told"


def test_an_address_that_others_reach_needs_keys() -> None:
    check_address("0.0.0.0", has_keys=True)
    with pytest.raises(ConfigError, match="--tokens-file"):
        check_address("0.0.0.0", has_keys=False)


# ---- measurement --------------------------------------------------------------------------------


def figures(served: Served) -> dict[str, float]:
    with served.http() as http:
        text = http.get("/metrics").text
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z_]+(\{[^}]*\})?", name) for name, _, _ in rows), text
    return {name: float(value) for name, _, value in rows}


def test_metrics_count_requests_tokens_and_times(sampler: PlayedSampler) -> None:
    with serving(make_state(sampler)) as served:
        answer = complete(served, "", prompt=[65] * 9)
        with pytest.raises(openai.BadRequestError):
            complete(served, "", n=0)
        found = figures(served)
    sampled = answer.usage.completion_tokens
    assert found['etude_serve_requests_total{endpoint="completions",status="200"}'] == 1
    assert found['etude_serve_requests_total{endpoint="completions",status="400"}'] == 1
    assert found["etude_serve_prompt_tokens_total"] == 9
    assert found["etude_serve_sampled_tokens_total"] == sampled
    assert found["etude_serve_time_to_first_token_seconds_count"] == 1
    assert found["etude_serve_inter_token_seconds_count"] == sampled - sampler.chunk_tokens
    assert found['etude_serve_inter_token_seconds_bucket{le="+Inf"}'] == sampled - sampler.chunk_tokens
    assert (found["etude_serve_running"], found["etude_serve_outstanding_tokens"]) == (0, 0)


def test_readiness_tells_the_load(sampler: PlayedSampler) -> None:
    sampler.answers, sampler.pause_s = (lambda context: "word " * 100), 600.0
    with serving(make_state(sampler)) as served, served.http() as http:
        stream = complete(served, "", prompt=[65] * 10, max_tokens=500, stream=True)
        next(iter(stream))
        row = http.get("/ready").json()
        stream.close()
        assert (row["version"], row["pool"], row["running"], row["waiting"]) == ("scripted@0", "serve", 1, 0)
        assert 0 < row["outstanding_tokens"] < 500


def test_a_histogram_is_cumulative() -> None:
    metrics = serve_metrics()
    for seconds in (0.001, 0.02, 0.02, 1e9):
        metrics.observe("etude_serve_request_seconds", seconds)
    text = metrics.text({})
    counts = [int(n) for n in re.findall(r'request_seconds_bucket\{le="[^"]+"\} (\d+)', text)]
    assert counts == sorted(counts) and counts[-1] == 4 and counts[0] == 1
    assert "etude_serve_request_seconds_count 4" in text


# ---- weights ------------------------------------------------------------------------------------

VERSION = PolicyVersion("run", 5, "abc")
MANIFEST = WeightManifest(VERSION, (TensorEntry("w", (2, 3), "float32", "00", (1, 1)),), "memory:x", VERSION)


@pytest.fixture
def served(sampler: PlayedSampler) -> Iterator[Served]:
    with serving(make_state(sampler, PlayedSink())) as running:
        yield running


def test_the_administrator_brings_a_version_into_service(served: Served) -> None:
    body = {"manifest": manifest_document(MANIFEST), "kv": "recompute"}
    with served.http(ADMIN) as http:
        assert http.get("/admin/weights").json()["version"]["lineage"] == "scripted"
        staged = http.post("/admin/weights/stage", json=body)
        assert (staged.status_code, staged.json()["version"]["step"]) == (200, 0)
        version = {"version": staged.json()["staged"], "kv": "recompute"}
        assert http.post("/admin/weights/activate", json=version).json()["version"]["step"] == 5
        assert http.post("/admin/weights", json=body).status_code == 200
        assert http.get("/ready").json()["version"] == "run@5"
    sink = served.state.sink
    assert isinstance(sink, PlayedSink) and sink.kv == "recompute"


def test_a_version_that_does_not_fit_leaves_the_old_one(served: Served) -> None:
    bad = manifest_document(MANIFEST)
    bodies = [
        ({"manifest": bad | {"tensors": []}}, "tensors"),
        ({"manifest": bad | {"tensors": [{"name": "w", "shape": 3}]}}, "manifest.tensors[0].shape"),
        ({"manifest": bad | {"url": None}}, "manifest.url"),
        ({"manifest": bad | {"version": {"lineage": "r"}}}, "manifest.version.step"),
        ({"manifest": bad | {"extra": 1}}, "manifest.extra"),
        ({"manifest": bad, "kv": "drop"}, "kv"),
        ({"other": 1}, "body.other"),
        ({}, "manifest"),
    ]
    with served.http(ADMIN) as http:
        for body, param in bodies:
            answer = http.post("/admin/weights", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        unstaged = {"version": {"lineage": "run", "step": 9}}
        assert http.post("/admin/weights/activate", json=unstaged).status_code == 400
        assert http.get("/ready").json()["version"] == "scripted@0"


def test_only_the_administrator_touches_weights(sampler: PlayedSampler) -> None:
    state = make_state(sampler, keys=keys())
    with serving(state) as served:
        for token, status in (("", 401), (ALICE, 403), ("é", 403)):
            with served.http() as http:
                header = {"authorization": f"Bearer {token}".encode()} if token else {}
                assert http.post("/admin/weights", headers=header, json={}).status_code == status
                assert http.get("/admin/weights", headers=header).status_code == status
        state.admin_token = ""
        with served.http("") as http:
            assert http.post("/admin/weights", json={}).status_code == 403


# ---- the end ------------------------------------------------------------------------------------


def test_a_server_that_drains_finishes_what_it_answers_and_takes_nothing_new(
    sampler: PlayedSampler,
) -> None:
    sampler.answers, sampler.pause_s = replies(["word " * 30]), 0.02
    with serving(make_state(sampler)) as served:
        stream = complete(served, "", stream=True, max_tokens=300)
        served.state.draining = True
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            complete(served, "")
        with served.http() as http:
            assert http.get("/ready").status_code == 503
        assert "".join(chunk.choices[0].text for chunk in stream) == "word " * 30


def test_a_server_says_where_it_is_ready_and_a_signal_drains_it(
    sampler: PlayedSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    state, listeners = make_state(sampler), open_listeners("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
    ready = f"inference server: ready at {url}; it serves tiny (scripted@0)\n"

    async def run() -> None:
        task = asyncio.create_task(serve(state, listeners, drain_s=600))
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=url, timeout=60) as client:
            while ready not in capsys.readouterr().err:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            body = {"prompt": "x", "max_tokens": 300}
            answering = asyncio.create_task(client.post("/v1/completions", json=body))
            while not state.live:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await answering).json()["choices"][0]["text"] == "word " * 20
            await task
        assert state.draining

    sampler.answers, sampler.pause_s = (lambda context: "word " * 20), 0.02
    asyncio.run(run())
    assert "shutting down when its requests have ended" in capsys.readouterr().err
    assert all(listener.fileno() == -1 for listener in listeners)


def test_a_key_without_its_certificate_is_refused(sampler: PlayedSampler, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a key without a certificate"):
        asyncio.run(serve(make_state(sampler), open_listeners("127.0.0.1", 0), key=tmp_path / "key.pem"))
