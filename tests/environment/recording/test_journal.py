"""Journals of live sessions: recovery of the same session map after torn writes, damage and kills."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environment.recording import (
    AnswerService,
    MapLimits,
    Recordings,
    RendererCache,
    SessionMap,
)
from etude.environment.recording.journal import SessionJournal, find_sessions, read_journal, replay
from etude.errors import ConfigError, StoreError
from etude.kit.ports import free_port
from etude.records import RewardBreakdown, SampleChunk, SampleRequest
from etude.store.trajectories import TrajectoryLog
from etude.tokens import CHATML_TEMPLATE
from etude.tokens.grammar import HermesGrammar
from tests.environment.recording.recording_builders import (
    TOKEN,
    ChatClient,
    TellingSampler,
    check_recording,
    make_recordings,
    qwen_tokenizer,
    renderers,
    replies,
)
from tests.environment.recording.serving import Served, serving
from tests.environment.recording.test_session_map import SYSTEM, USER, run
from tests.environment.recording.test_session_trees import RandomClient, random_answer
from tests.environment.recording.test_sessions import chat, start

HEADER = {"id": "s"}


def journaled(sampler: TellingSampler, keep: bool, path: Path) -> AnswerService:
    session_map = SessionMap("run/t/e0/g0/0", renderers().find, MapLimits(), keep)
    journal = SessionJournal.create(path, HEADER)
    return AnswerService(session_map, sampler, answer_s=60, abort_s=60, journal=journal)


def replayed(path: Path, keep: bool = True) -> tuple[SessionMap, RewardBreakdown | None]:
    taken = read_journal(path)
    assert taken is not None
    journal, lines = taken
    made = SessionMap("run/t/e0/g0/0", renderers().find, MapLimits(), keep)
    reward = replay(lines[1:], made)
    journal.close()
    return made, reward


def told(session_map: SessionMap) -> Any:
    """All that a trajectory takes from a map, and the routes."""
    rows = []
    for segment in session_map.segments():
        arrays = [segment.tokens.tolist(), segment.sampled.tolist(), segment.logprobs.tolist()]
        rest = [segment.id, segment.agent_id, segment.parent, segment.relation, segment.sampling]
        spans = [segment.version_spans, segment.kv_oldest_spans, segment.turn_spans]
        rows.append([*arrays, *rest, *spans])
    routes = [branch.recording.routes() for branch in session_map.branches]
    shown = [None if one is None else np.asarray(one).tolist() for one in routes]
    return rows, shown, session_map.turns(), session_map.abandoned(), asdict(session_map.counts)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32), keep=st.booleans(), failing=st.booleans())
def test_any_tree_of_conversations_is_the_same_from_its_journal(seed: int, keep: bool, failing: bool) -> None:
    noise = random.Random(seed)
    sampler = TellingSampler(lambda context: random_answer(noise), chunk_tokens=noise.choice([1, 3, 0]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s.jsonl")
        service = journaled(sampler, keep, path)
        client = RandomClient(ChatClient(service), noise)

        async def talk() -> None:
            for _ in range(10):
                if failing and noise.random() < 0.2:
                    sampler.failures = 1
                if noise.random() < 0.1:
                    for branch in service.session_map.branches:
                        sampler.inner.drop_prefix(branch.id)
                await client.step()

        run(talk())
        assert service.journal is not None
        service.journal.close()
        made, _ = replayed(path, keep)
        assert told(made) == told(service.session_map)
        # And it goes on from there, with a sampler that knows nothing.
        again = AnswerService(made, sampler, answer_s=60, abort_s=60)
        sampler.failures = 0
        for branch in made.branches:
            sampler.inner.drop_prefix(branch.id)
        client.client.service = again
        run(client.step())
        check_recording(again, sampler)


def played(path: Path, texts: list[str]) -> tuple[AnswerService, list[dict[str, Any]]]:
    service = journaled(TellingSampler(replies(texts)), True, path)
    history = [SYSTEM, USER]

    async def talk() -> None:
        for _ in texts:
            document = await ChatClient(service).send(history)
            history.append(document["choices"][0]["message"])
            history.append({"role": "user", "content": "go on"})

    run(talk())
    return service, history


def test_a_history_is_written_once_however_often_it_is_told(tmp_path: Path) -> None:
    words = "x" * 2000
    service, _ = played(tmp_path / "s", [f"{words} {number}" for number in range(8)])
    assert service.journal is not None
    service.journal.close()
    begins = [line for line in (tmp_path / "s").read_text().splitlines() if '"kind":"begin"' in line]
    assert len(begins) == 8
    assert all(begin.count(words) <= 1 for begin in begins)


def test_an_answer_that_was_cut_off_has_failed_and_may_be_asked_for_again(tmp_path: Path) -> None:
    service, _ = played(tmp_path / "s", ["One.", "Two."])
    assert service.journal is not None
    service.journal.close()
    whole = (tmp_path / "s").read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        (tmp_path / "s").write_bytes(whole[:-cut])
        made, _ = replayed(tmp_path / "s")
        assert (made.counts.requests, made.counts.failed) == (2, 1)
        assert [turn.text for turn in made.turns()] == [turn.text for turn in service.session_map.turns()[:1]]
        assert (tmp_path / "s").read_bytes() == b"".join(lines[:-1])


def test_an_answer_that_was_given_up_since_its_client_left_has_not_failed(tmp_path: Path) -> None:
    class Silent(TellingSampler):
        async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
            await asyncio.sleep(3600)
            async for chunk in super().stream(request):
                yield chunk

    service = journaled(Silent(replies([])), True, tmp_path / "s")
    service.abort_s = 0.1

    async def leave() -> None:
        asking = asyncio.ensure_future(ChatClient(service).send([SYSTEM, USER]))
        while not service.session_map.counts.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking.cancel()
        await service.stop()

    run(leave())
    assert service.journal is not None
    service.journal.close()
    made, _ = replayed(tmp_path / "s")
    assert made.counts == service.session_map.counts
    assert (made.counts.failed, made.counts.aborted, made.turns()) == (0, 1, ())


def test_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    service, _ = played(tmp_path / "s", ["One.", "Two."])
    assert service.journal is not None
    service.journal.close()
    whole = (tmp_path / "s").read_bytes()
    place = whole.index(b'"kind":"commit"')
    (tmp_path / "s").write_bytes(whole[:place] + b"#" + whole[place + 1 :])
    with pytest.raises(StoreError, match="damaged"):
        read_journal(tmp_path / "s")
    lines = whole.splitlines(keepends=True)
    (tmp_path / "s").write_bytes(b"".join([lines[0], lines[2]]))
    with pytest.raises(StoreError, match="is inconsistent"):
        replayed(tmp_path / "s")


def test_a_journal_that_cannot_be_written_refuses_requests_and_loses_nothing(tmp_path: Path) -> None:
    recordings = make_recordings(TellingSampler(replies(["One.", "Two."])), tmp_path)
    with serving(recordings) as served:
        session = served.create()
        assert chat(served, session).status_code == 200
        recordings.find(session["id"]).journal.close()  # as a disk that is gone
        for _ in range(2):
            answer = chat(served, session)
            assert answer.status_code == 503 and "journal" in answer.text
        with served.control() as client:
            assert client.post(f"/sessions/{session['id']}/reward", json={"task": 1}).status_code == 503
            told = client.post(f"/sessions/{session['id']}/finish", json={"reward": 1}).json()
    assert told["stored"] and told["sampled_tokens"]


def finish(served: Served, session: dict[str, Any]) -> dict[str, Any]:
    with served.control() as client:
        answer = client.post(f"/sessions/{session['id']}/finish", json={})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
def test_a_killed_server_has_its_live_sessions_again(tmp_path: Path) -> None:
    port = free_port()
    served = Served(f"http://127.0.0.1:{port}", None)  # type: ignore[arg-type]
    process = start(tmp_path, port)
    try:
        session, deleted, over = (served.create() for _ in range(3))
        message = chat(served, session).json()["choices"][0]["message"]
        with served.control() as client:
            client.post(f"/sessions/{session['id']}/reward", json={"task": 0.5})
            client.delete(f"/sessions/{deleted['id']}")
        finish(served, over)
    finally:
        process.kill()
        process.wait(60)
    assert [path.stem for path in (tmp_path / "live").iterdir()] == [session["id"]]
    process = start(tmp_path, port)
    try:
        messages = [{"role": "user", "content": "Fix it."}, message, {"role": "user", "content": "And now?"}]
        answer = httpx.post(
            f"{session['openai_base_url']}/chat/completions", json={"messages": messages}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        body = {"model": "m", "messages": messages[:1]}
        keyed = httpx.post(
            f"{served.url}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {session['key']}"},
            timeout=60,
        )
        assert keyed.status_code == 200
        told = finish(served, session)
        assert told["reward"] == 0.5
        assert told["facts"]["continued"] == 1 and told["segments"] == 2
    finally:
        process.kill()
        process.wait(60)
    assert not list((tmp_path / "live").iterdir())
    stored = {str(group.members[0].id): group.members[0] for group in TrajectoryLog(tmp_path).read()}
    assert len(stored) == 2
    assert stored[session["trajectory"]].num_sampled_tokens == told["sampled_tokens"]


def test_a_session_that_was_stored_as_the_server_died_is_not_stored_twice(tmp_path: Path) -> None:
    with serving(make_recordings(TellingSampler(lambda context: "Done."), tmp_path)) as served:
        session = served.create()
        chat(served, session)
        journal = tmp_path / "live" / f"{session['id']}.jsonl"
        data = journal.read_bytes()
        assert finish(served, session)["stored"] and not journal.exists()
    journal.write_bytes(data)
    recordings = make_recordings(TellingSampler(lambda context: "Done."), tmp_path)
    assert recordings.recover() == 1
    with serving(recordings) as served:
        assert not finish(served, session)["stored"]
    assert len(TrajectoryLog(tmp_path)) == 1


def test_sessions_of_another_model_and_of_a_living_server_are_left_alone(tmp_path: Path) -> None:
    sampler = TellingSampler(lambda context: "Done.")
    first = make_recordings(sampler, tmp_path)
    with serving(first) as served:
        served.create()
        assert make_recordings(sampler, tmp_path).recover() == 0
    other = RendererCache(qwen_tokenizer(), HermesGrammar, CHATML_TEMPLATE)
    with pytest.raises(ConfigError, match="another tokenizer"):
        Recordings(sampler, other, tmp_path, {TOKEN: "team"}).recover()
    (path,) = (tmp_path / "live").iterdir()
    path.write_bytes(b"torn")
    assert make_recordings(sampler, tmp_path).recover() == 0
    assert not path.exists()


def test_sessions_that_another_server_ends_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_recordings(TellingSampler(lambda context: "Done."), tmp_path)) as served:
        for _ in range(2):
            served.create()
    paths = sorted((tmp_path / "live").iterdir(), key=lambda path: (path.stat().st_mtime, path.name))
    finding = find_sessions(tmp_path / "live", renderers())
    _, journal, _, _ = next(finding)
    journal.close()
    paths[1].unlink()  # before it is opened
    assert list(finding) == []
    monkeypatch.setattr("fcntl.flock", lambda *_: paths[0].unlink())  # before it is locked
    assert list(find_sessions(tmp_path / "live", renderers())) == []
