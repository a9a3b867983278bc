"""Sessions over HTTP: authorisation, limits, ends, and recovery after a kill."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.cli.record import serve_command
from etude.environment.recording import RecordingLimits, Recordings
from etude.environment.recording.live import SessionEndedError
from etude.environment.recording.spec import SessionSpec
from etude.errors import ConfigError, EtudeError, StoreError
from etude.kit.ports import free_port
from etude.records import RewardBreakdown, SampleRequest, Status, TrajectoryId
from etude.serving.token_files import read_or_make_tenants
from etude.store.blobs import MemoryBlobs
from etude.store.trajectories import TrajectoryLog
from etude.tokens.chat.errors import BadRequestError
from tests.environment.recording.recording_builders import (
    TOKEN,
    TellingSampler,
    answer_tokens,
    make_recordings,
    replies,
)
from tests.environment.recording.serving import Served, SlowSampler, serving, wait_for

CHAT = {"messages": [{"role": "user", "content": "Fix it."}]}
_SINGLE = {"parallel_tool_calls": False}


@pytest.fixture
def sampler() -> SlowSampler:
    return SlowSampler(lambda context: "Done.")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that ask it nothing twice."""
    store = tmp_path_factory.mktemp("store")
    with serving(make_recordings(SlowSampler(lambda context: "Done."), store)) as running:
        yield running


@pytest.fixture
def served(tmp_path: Path, sampler: SlowSampler) -> Iterator[Served]:
    limits = RecordingLimits(sessions_per_tenant=3, requests_per_session=2, idle_s=3600)
    with serving(make_recordings(sampler, tmp_path, limits=limits)) as running:
        yield running


def chat(served: Served, session: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(
        f"{session['openai_base_url']}/chat/completions", json={**CHAT, **more}, timeout=60, verify=False
    )


def test_an_agent_can_neither_reward_nor_finish_itself(served: Served) -> None:
    session = served.create()
    for key in (session["key"], session["id"], "", "other-token"):
        with served.control(key) as client:
            for path in ("reward", "finish"):
                answer = client.post(f"/sessions/{session['id']}/{path}", json={"task": 1.0})
                assert answer.status_code in (401, 404), answer.text
            assert client.get(f"/sessions/{session['id']}").status_code in (401, 404)
            assert client.delete(f"/sessions/{session['id']}").status_code in (401, 404)
    with served.control() as client:
        assert client.get(f"/sessions/{session['id']}").json()["reward"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "task"),
        ({"task": "t", "extra": 1}, "extra"),
        ({"task": "../.."}, "task"),
        ({"task": ""}, "task"),
        ({"task": "t", "run": "a/b"}, "run"),
        ({"task": "t", "index": -1}, "index"),
        ({"task": "t", "sampling": {"top_p": 0.5}}, "sampling.top_p"),
        ({"task": "t", "metadata": []}, None),
        ({"task": "t", "metadata": "x"}, "metadata"),
        ([], "body"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused_by_name(
    shared: Served, body: Any, field: str | None
) -> None:
    with shared.control() as client:
        answer = client.post("/sessions", json=body)
    if field is None:
        assert answer.status_code == 201
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "reward", [{"task": "1"}, {"task": 1e999}, {"task": True}, {"task": 1, "terms": {"a": None}}]
)
def test_a_reward_that_is_no_number_is_refused(shared: Served, reward: dict[str, Any]) -> None:
    session = shared.create()
    with shared.control() as client:
        url, data = f"/sessions/{session['id']}/reward", json.dumps(reward)
        assert client.post(url, content=data).status_code == 400


def test_limits_of_sessions_and_of_requests_hold(served: Served, sampler: SlowSampler) -> None:
    sessions = [served.create(index=index) for index in range(3)]
    with served.control() as client:
        assert client.post("/sessions", json={"task": "t", "index": 9}).status_code == 429
    sampler.most_chunks = 1

    async def crowd() -> list[int]:
        async with httpx.AsyncClient(timeout=60, verify=False) as client:
            url = f"{sessions[0]['openai_base_url']}/chat/completions"
            asking = [asyncio.create_task(client.post(url, json=CHAT)) for _ in range(3)]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            sampler.most_chunks = math.inf
            answers = await asyncio.gather(*asking)
        return sorted(answer.status_code for answer in answers)

    assert asyncio.run(crowd()) == [200, 200, 429]


def test_a_request_counts_while_it_is_still_being_sent(served: Served) -> None:
    session = served.create()
    url = httpx.URL(f"{session['openai_base_url']}/chat/completions")
    head = f"POST {url.path} HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: 99\r\n\r\n"
    with (
        socket.create_connection((url.host, url.port)) as one,
        socket.create_connection((url.host, url.port)) as two,
    ):
        for connection in (one, two):
            connection.sendall(head.encode())
        wait_for(lambda: served.recordings.num_requests == 2)
        assert chat(served, session).status_code == 429
    wait_for(lambda: not served.recordings.num_requests)
    assert chat(served, session).status_code == 200


def test_the_same_trajectory_is_not_opened_twice(served: Served) -> None:
    served.create()
    with served.control() as client:
        assert client.post("/sessions", json={"run": "r", "task": "t"}).status_code == 400


def test_a_stored_trajectory_is_opened_by_no_session_and_finishing_again_says_the_same(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        recordings = make_recordings(SlowSampler(replies([])), tmp_path)
        session = recordings.create("team", SPEC)
        told = await recordings.finish("team", session.id)
        assert told["stored"] and await recordings.finish("team", session.id) == told
        for server in (recordings, make_recordings(SlowSampler(replies([])), tmp_path)):
            with pytest.raises(BadRequestError, match="stored") as caught:
                server.create("others", SPEC)
            assert caught.value.field == "trajectory"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("more", "streaming"), [({}, False), ({"stream": True}, True), ({"stop": ["x"]}, True), (_SINGLE, True)]
)
def test_tokens_come_as_they_are_sampled_where_the_answer_is_streamed_or_may_end_early(
    served: Served,
    sampler: SlowSampler,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    streaming: bool,
) -> None:
    asked: list[bool] = []
    stream = sampler.stream

    def seen(request: SampleRequest) -> Any:
        asked.append(request.streaming)
        return stream(request)

    monkeypatch.setattr(sampler, "stream", seen)
    assert chat(served, served.create(), **more).status_code == 200
    assert asked == [streaming]


def test_what_an_agent_asks_for_in_vain_is_not_checked(served: Served) -> None:
    ignored = {"temperature": 99, "top_p": "x", "top_k": -7, "min_p": 4}
    assert chat(served, served.create(), **ignored).status_code == 400
    assert chat(served, served.create(sampling={"temperature": 1.0}), **ignored).status_code == 200


def test_finishing_aborts_what_is_being_sampled_and_keeps_it(
    served: Served, sampler: SlowSampler, tmp_path: Path
) -> None:
    sampler.pause_s, sampler.inner._chunk_tokens = 0.1, 1
    sampler.answers = lambda context: "word " * 400
    session = served.create()
    with (
        served.control() as client,
        client.stream(
            "POST", f"/s/{session['id']}/v1/chat/completions", json={**CHAT, "stream": True}
        ) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        with served.control() as other:
            told = other.post(f"/sessions/{session['id']}/finish", json={"status": "limit", "cause": "time"})
        assert told.status_code == 200
        assert any("[DONE]" in line for line in lines)
    (group,) = TrajectoryLog(tmp_path).read()
    assert (group.members[0].status, group.members[0].cause) == (Status.LIMIT, "time")
    assert 0 < group.members[0].num_sampled_tokens < 400
    assert sampler.closed


def test_an_infrastructure_failure_has_no_reward(served: Served, tmp_path: Path) -> None:
    session = served.create()
    chat(served, session)
    with served.control() as client:
        body = {"status": "infrastructure", "cause": "sandbox", "reward": 1.0}
        assert client.post(f"/sessions/{session['id']}/finish", json=body).json()["reward"] is None
    (group,) = TrajectoryLog(tmp_path).read()
    assert group.members[0].reward is None


def test_a_session_without_an_answer_is_stored_without_segments(served: Served, tmp_path: Path) -> None:
    session = served.create()
    with served.control() as client:
        told = client.post(f"/sessions/{session['id']}/finish", json={"status": "agent_error"}).json()
    assert told["segments"] == 0
    (group,) = TrajectoryLog(tmp_path).read()
    assert group.members[0].segments == ()


def test_a_deleted_session_is_not_stored(served: Served, tmp_path: Path) -> None:
    session = served.create()
    chat(served, session)
    with served.control() as client:
        assert client.delete(f"/sessions/{session['id']}").status_code == 204
        assert client.get(f"/sessions/{session['id']}").status_code == 404
    assert chat(served, session).status_code == 404
    assert list(TrajectoryLog(tmp_path).read()) == []


def test_metrics_health_and_draining(served: Served) -> None:
    session = served.create()
    chat(served, session)
    with served.control("") as client:
        assert client.get("/health").json() == {"status": "ok", "sessions": 1}
        text = client.get("/metrics").text
        assert "etude_recording_requests_total 1.0\n" in text and "etude_recording_sessions 1.0\n" in text
        served.recordings.draining = True
        assert client.get("/health").status_code == 503
    with served.control() as client:
        assert client.post("/sessions", json={"task": "u"}).status_code == 503
    assert chat(served, session).status_code == 200, "what lives may go on"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b'{"messages": 1}', b'{"messages": [1]}', b"\xff\xfe", b"NaN"]
)
def test_bodies_that_make_no_sense_are_refused(shared: Served, data: bytes) -> None:
    url = f"{shared.create()['openai_base_url']}/chat/completions"
    answer = httpx.post(url, content=data, timeout=60, verify=False)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_half_characters_and_nuls_in_a_history_are_recorded(shared: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b\\u0000c"}]}'
    session = shared.create()
    for _ in range(2):
        answer = httpx.post(
            f"{session['openai_base_url']}/chat/completions", content=body, timeout=60, verify=False
        )
        assert answer.status_code == 200
    with shared.control() as client:
        assert client.get(f"/sessions/{session['id']}").json()["counts"]["forks"] == 1


@pytest.mark.parametrize(
    ("has_answer", "failures", "reward", "is_watched", "ending"),
    [
        (False, 0, None, True, (Status.INFRASTRUCTURE, None)),
        (True, 0, None, True, (Status.LIMIT, 0.0)),
        (True, 0, None, False, (Status.INFRASTRUCTURE, None)),
        (True, 0, 0.5, False, (Status.LIMIT, 0.5)),
        (True, 1, None, True, (Status.INFRASTRUCTURE, None)),
    ],
)
def test_an_idle_session_has_failed_if_its_agent_has_an_answer_and_its_tenant_lives(
    tmp_path: Path,
    has_answer: bool,
    failures: int,
    reward: float | None,
    is_watched: bool,
    ending: tuple[Status, float | None],
) -> None:
    """An agent that waits for ever does not leave the batch so; one that the sampler failed does, and one
    whose harness was killed together with whoever started it."""
    sampler = SlowSampler(lambda context: "Done.")
    with serving(make_recordings(sampler, tmp_path, limits=RecordingLimits(idle_s=1.0))) as running:
        session = running.create()
        if has_answer:
            assert chat(running, session).status_code == 200
        if failures:
            sampler.failures = failures
            assert chat(running, session).status_code == 503
        if reward is not None:
            with running.control() as client:
                client.post(f"/sessions/{session['id']}/reward", json={"task": reward}).raise_for_status()
        with running.control() as client:
            while len(running.recordings):
                if is_watched:
                    client.get(f"/sessions/{session['id']}")
                time.sleep(0.02)
    (group,) = TrajectoryLog(tmp_path).read()
    (member,) = group.members
    assert (member.status, member.reward and member.reward.total, member.cause) == (*ending, "idle")


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


SPEC = SessionSpec(TrajectoryId("r", "t", 0, 0, 0))


def test_a_session_that_is_used_while_another_one_is_ended_for_idleness_lives_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        recordings = make_recordings(SlowSampler(replies([])), tmp_path, limits=RecordingLimits(idle_s=0))
        first = recordings.create("team", SPEC)
        second, third = (
            recordings.create("team", replace(SPEC, trajectory_id=TrajectoryId("r", "t", 0, 0, index)))
            for index in (1, 2)
        )
        expiring = asyncio.ensure_future(recordings.expire())
        await until(lambda: first.state == "finishing")
        with recordings.using(second):
            await recordings.delete("team", third.id)
            assert await expiring == 1
        assert second.state == "live" and len(recordings) == 1
        await recordings.close()

    asyncio.run(scenario())
    assert [str(group.members[0].id) for group in TrajectoryLog(tmp_path).read()] == ["r/t/e0/g0/0"]


def test_a_session_that_ends_while_a_request_is_read_takes_it_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        recordings = make_recordings(SlowSampler(replies([])), tmp_path)
        session = recordings.create("team", SPEC)
        finishing = asyncio.ensure_future(recordings.finish("team", session.id))
        await until(lambda: session.state == "finishing")
        for _ in range(2):
            with pytest.raises(SessionEndedError), recordings.using(session):
                pass
            with pytest.raises(SessionEndedError):
                await recordings.set_reward(session, RewardBreakdown(1.0))
            await finishing
        await recordings.close()

    asyncio.run(scenario())


def test_a_reward_that_is_acknowledged_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        recordings = make_recordings(SlowSampler(replies([])), tmp_path)
        session = recordings.create("team", SPEC)
        begun, stored = asyncio.Event(), asyncio.Event()
        sync = session.journal.sync

        async def slowly() -> None:
            begun.set()
            await stored.wait()
            await sync()

        session.journal.sync = slowly
        rewarding = asyncio.ensure_future(recordings.set_reward(session, RewardBreakdown(1.0)))
        await begun.wait()
        told = await recordings.finish("team", session.id)
        stored.set()
        (error,) = await asyncio.gather(rewarding, return_exceptions=True)
        assert told["reward"] is None and isinstance(error, EtudeError)
        await recordings.close()

    asyncio.run(scenario())


class FullBlobs(MemoryBlobs):
    """A store without room, until there is some."""

    full = True

    def put(self, array: Any) -> Any:
        if self.full:
            raise StoreError("no space left", field="blobs")
        return super().put(array)


def test_a_store_without_room_loses_nothing(tmp_path: Path) -> None:
    blobs = FullBlobs()
    sampler = SlowSampler(lambda context: "Done.")
    with serving(make_recordings(sampler, tmp_path, blobs=blobs)) as running:
        session = running.create()
        chat(running, session)
        with running.control() as client:
            url = f"/sessions/{session['id']}/finish"
            assert client.post(url, json={"reward": 1.0}).status_code == 503
            blobs.full = False
            told = client.post(url, json={})
        assert (told.status_code, told.json()["reward"]) == (200, 1.0)
        assert told.json()["sampled_tokens"] == len(answer_tokens("Done."))


def test_an_idle_session_that_could_not_be_stored_was_not_rewarded_by_that(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = RecordingLimits(idle_s=0)
        recordings = make_recordings(SlowSampler(replies([])), tmp_path, limits=limits)
        session = recordings.create("team", SPEC)
        append = recordings._log.append

        def fail(groups: Any) -> int:
            raise StoreError("no space left", field="part")

        recordings._log.append = fail  # type: ignore[method-assign]
        with pytest.raises(StoreError):
            await recordings.expire()
        assert session.state == "live" and session.reward is None
        recordings._log.append = append  # type: ignore[method-assign]
        assert await recordings.expire() == 1

    asyncio.run(scenario())
    (group,) = TrajectoryLog(tmp_path).read()
    assert group.members[0].status is Status.INFRASTRUCTURE


def test_a_session_that_cannot_be_kept_is_not_begun(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("the disk is full")

    with served.control() as client, monkeypatch.context() as patched:
        patched.setattr("os.fdatasync", full)
        assert client.post("/sessions", json={"task": "t"}).status_code == 503
        assert len(served.recordings) == 0
        patched.undo()
        assert client.post("/sessions", json={"task": "t"}).status_code == 201


def test_a_sampler_that_never_answers_ends_at_its_deadline(tmp_path: Path) -> None:
    class Silent(TellingSampler):
        async def stream(self, request: Any) -> AsyncIterator[Any]:
            await asyncio.sleep(3600)
            yield

    recordings = make_recordings(
        Silent(replies([])), tmp_path, limits=RecordingLimits(answer_s=0.2, abort_s=0.2)
    )
    with serving(recordings) as running:
        answer = chat(running, running.create())
        assert answer.status_code == 503 and "too long" in answer.text


def test_token_files_are_made_for_their_owner_alone_and_refused_if_others_read_them(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    made = read_or_make_tenants(path, "recording server")
    assert read_or_make_tenants(path, "recording server") == made and path.stat().st_mode & 0o077 == 0
    path.write_text("team secret\nother more\n")
    assert read_or_make_tenants(path, "recording server") == {"secret": "team", "more": "other"}
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        read_or_make_tenants(path, "recording server")


def test_other_hosts_are_served_with_tls_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unencrypted"):
        serve_command(tmp_path, tmp_path / "store", host="0.0.0.0")


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.environment.recording.recording_builders import TellingSampler, make_recordings
from etude.environment.recording.server import serve
recordings = make_recordings(TellingSampler(lambda context: "Done."), Path(sys.argv[1]))
from etude.serving.listening import open_listeners
asyncio.run(serve(recordings, open_listeners("127.0.0.1", int(sys.argv[2])), drain_s=60))
"""


def start(store: Path, port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(store), str(port)], cwd=Path(__file__).parents[3], env=os.environ
    )
    end_s = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=1, verify=False)
        except httpx.HTTPError:
            assert process.poll() is None and time.monotonic() < end_s, "the server did not start"
            time.sleep(0.05)
        else:
            return process


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill_and_a_drained_server_ends_by_itself(tmp_path: Path) -> None:
    port = free_port()
    served = Served(f"http://127.0.0.1:{port}", None)  # type: ignore[arg-type]
    process = start(tmp_path, port)
    try:
        session = served.create()
        assert chat(served, session).status_code == 200
        with served.control() as client:
            assert client.post(f"/sessions/{session['id']}/finish", json={"reward": 1.0}).status_code == 200
    finally:
        process.kill()
        process.wait(60)
    (group,) = TrajectoryLog(tmp_path).read()
    assert group.members[0].reward is not None and group.members[0].num_sampled_tokens
    process = start(tmp_path, port)
    try:
        session = served.create(index=1)
        process.send_signal(signal.SIGTERM)
        with served.control() as client:
            wait_for(lambda: client.get("/health").status_code == 503)
            assert client.post("/sessions", json={"task": "x"}).status_code == 503
            assert chat(served, session).status_code == 200
            assert client.post(f"/sessions/{session['id']}/finish", json={}).status_code == 200
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)
    assert len(TrajectoryLog(tmp_path)) == 2


def test_the_store_is_one_for_all_tenants_but_their_sessions_are_apart(tmp_path: Path) -> None:
    recordings: Recordings = make_recordings(TellingSampler(lambda context: "Done."), tmp_path)
    assert recordings.tenant_of(TOKEN) == "team" and recordings.tenant_of("other-token") == "others"


class ShutSampler(SlowSampler):
    """Fails to close a session."""

    def close(self, session_id: str) -> None:
        raise StoreError(f"{session_id} cannot be closed", field="sampler")


def test_a_session_that_cannot_be_stopped_keeps_no_other_from_being_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        recordings = make_recordings(ShutSampler(replies([])), tmp_path)
        for index in (0, 1):
            spec = replace(SPEC, trajectory_id=TrajectoryId("r", "t", 0, 0, index))
            recordings.create("team", spec).service._opened.add("a")
        with pytest.raises(StoreError, match="cannot be closed"):
            await recordings.close()
        # Their journals are free: they were locked.
        later = make_recordings(SlowSampler(replies([])), tmp_path)
        assert later.recover() == 2
        await later.close()

    asyncio.run(scenario())


def test_sessions_are_left_side_by_side(tmp_path: Path) -> None:
    """Each may take long to stop."""

    async def scenario() -> None:
        sampler = SlowSampler(replies([]))
        recordings = make_recordings(sampler, tmp_path)
        stopping = asyncio.Event()

        async def waits_for_the_other() -> None:
            await stopping.wait()

        async def tells_the_other() -> None:
            stopping.set()

        for index, work in enumerate((waits_for_the_other, tells_the_other)):
            spec = replace(SPEC, trajectory_id=TrajectoryId("r", "t", 0, 0, index))
            recordings.create("team", spec).service.tasks.add(asyncio.ensure_future(work()))
        async with asyncio.timeout(60):
            await recordings.close()

    asyncio.run(scenario())
