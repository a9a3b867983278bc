import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from agent_builders import (
    FINISH,
    MEND,
    NEW,
    OLD,
    READ,
    TEST,
    chunk,
    contents,
    new_context,
    new_session,
    renderer,
    script_of,
)
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.scripted import ScriptedSampler
from xxhash import xxh3_64_hexdigest

from etude.agent import JournaledSession, LocalWorkspace, SummaryPolicy, core_registry, run_session
from etude.agent.inputs import (
    ArchivedIn,
    PrefixMissIn,
    ResultsIn,
    StopIn,
    UserIn,
    from_document,
    merge,
    to_document,
)
from etude.agent.journal import INTERRUPTED, describe, replay
from etude.agent.session import AgentSession
from etude.agent.tools.state import BackgroundState, Todo, ToolState
from etude.errors import ConfigError, StoreError
from etude.kit.journal import read_lines
from etude.protocols import Finished, RunCalls, Sample
from etude.records import Status, ToolCall, ToolErrorClass, ToolResult
from etude.tokens import Control, Renderer
from etude.tokens.grammar import XmlGrammar

TURNS = [[READ], [MEND, TEST], [FINISH]]


def start(path: Path, session: AgentSession | None = None) -> JournaledSession:
    return JournaledSession.create(path, session or new_session(), ToolState())


def resume(path: Path) -> JournaledSession:
    return JournaledSession.resume(path, renderer(), core_registry())


def play_journaled(path: Path, turns=TURNS, **arguments):
    journal = start(path)

    async def run():
        context = await new_context()
        await run_session(
            journal,
            ScriptedSampler(script_of(turns), **arguments),
            LocalWorkspace(context),
            "s",
            (0,),
            log=journal,
        )
        return context

    context = asyncio.run(run())
    journal.close()
    return journal, context


def assert_equal(one: AgentSession, two: AgentSession) -> None:
    assert (one.turns, one.status, one.cause) == (two.turns, two.status, two.cause)
    assert one.facts.to_dict() == two.facts.to_dict()
    assert one.progress == two.progress
    for first, second in zip(one.contexts, two.contexts, strict=True):
        assert (first.id, first.opening, first.relation, first.parent) == (
            second.id,
            second.opening,
            second.relation,
            second.parent,
        )
        for name in ("tokens", "logprobs", "sampled"):
            values = getattr(first.recording, name), getattr(second.recording, name)
            assert values[0].tobytes() == values[1].tobytes()
        assert first.recording.version_spans == second.recording.version_spans
        assert first.recording.kv_oldest_spans == second.recording.kv_oldest_spans
        assert first.recording.turn_spans == second.recording.turn_spans
        routes = first.recording.routes(), second.recording.routes()
        assert (routes[0] is None) == (routes[1] is None)
        if routes[0] is not None and routes[1] is not None:
            assert np.array_equal(routes[0], routes[1])


@pytest.mark.parametrize("chunk_tokens", [0, 1, 3])
def test_a_replayed_journal_gives_the_session_bit_for_bit(tmp_path, chunk_tokens):
    journal, _ = play_journaled(tmp_path / "s.jsonl", chunk_tokens=chunk_tokens, route_shape=(2, 2))
    session, _ = replay(tmp_path / "s.jsonl", renderer())
    assert_equal(session, journal.session)


def test_a_journal_gives_the_session_as_it_was_after_any_turn(tmp_path):
    play_journaled(tmp_path / "s.jsonl")
    for turns in range(4):
        session, _ = replay(tmp_path / "s.jsonl", renderer(), turns)
        assert len(session.turns) == turns
        assert isinstance(session.next_action(), Finished if turns == 3 else Sample)


def test_a_journal_cut_anywhere_resumes_to_the_same_tokens(tmp_path):
    straight, _ = play_journaled(tmp_path / "straight.jsonl", chunk_tokens=2)
    data = (tmp_path / "straight.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for number, length in enumerate({*range(first, len(data), 97), len(data) - 1, len(data)}):
        path = tmp_path / f"cut-{number}.jsonl"
        path.write_bytes(data[:length])
        journal = resume(path)

        async def run(journal=journal):
            context = await new_context()
            sampler = ScriptedSampler(script_of(TURNS))
            await run_session(journal, sampler, LocalWorkspace(context), "s", (0,), log=journal)

        asyncio.run(run())
        journal.close()
        assert journal.session.status is Status.DONE
        own = journal.session.recording
        if not any(result.output == INTERRUPTED for turn in journal.session.turns for result in turn.results):
            told = straight.session.recording
            # The bug is mended in another sandbox where the cut lies after it: results may differ then.
            prefix = min(own.turn_spans[3].end, told.turn_spans[3].end)
            assert own.tokens[:prefix].tobytes() == told.tokens[:prefix].tobytes()


def test_calls_that_may_have_run_are_not_run_again(tmp_path):
    path = tmp_path / "s.jsonl"
    journal = start(path)
    run = ToolCall("run_command", {"command": "echo x >> log"})
    journal.on_chunk(chunk(renderer().message([READ, run, TEST]), finish="stop", digest="d"))
    action = journal.next_action()
    assert isinstance(action, RunCalls)
    assert journal.record_calls(action.calls) == {}
    journal.record_result(2, ToolResult("2 passed"))
    journal.close()

    again = resume(path)
    known = again.record_calls(action.calls)
    assert known == {
        1: ToolResult(INTERRUPTED, ToolErrorClass.PROVIDER),
        2: ToolResult("2 passed"),
    }

    async def rest():
        context = await new_context()
        script = script_of([[], [FINISH]])
        await run_session(again, ScriptedSampler(script), LocalWorkspace(context), "s", (0,), log=again)
        return contents(context)

    files = asyncio.run(rest())
    again.close()
    assert "log" not in files
    results = again.session.turns[0].results
    assert results[0].output.startswith("1\tdef tally") and results[1].output == INTERRUPTED
    session, _ = replay(path, renderer())
    assert_equal(session, again.session)


def test_a_turn_that_had_not_begun_is_run_whole(tmp_path):
    path = tmp_path / "s.jsonl"
    journal = start(path)
    journal.on_chunk(chunk(renderer().message([TEST]), finish="stop", digest="d"))
    journal.close()
    again = resume(path)
    assert again.record_calls((TEST,)) == {}
    again.close()


def test_tools_memory_is_resumed_with_the_session(tmp_path):
    path = tmp_path / "s.jsonl"
    journal = start(path)
    journal.on_chunk(chunk(renderer().message([READ]), finish="stop", digest="d"))
    journal.state.todos = [Todo("1", "mend tally", "in_progress")]
    journal.state.commands["1"] = BackgroundState(77, 3)
    journal.on_results([ToolResult("x")])
    journal.state.commands["2"] = BackgroundState(78)
    journal.close()
    again = resume(path)
    assert again.state == ToolState(
        todos=[Todo("1", "mend tally", "in_progress")], commands={"1": BackgroundState(77, 3)}
    )
    again.close()


def test_a_session_that_was_stopped_and_continued_is_replayed(tmp_path):
    path = tmp_path / "s.jsonl"
    journal = start(path, new_session(summary=SummaryPolicy(300, 64, 0.5)))
    journal.on_chunk(chunk(renderer().message([READ])[:2], OLD))
    journal.on_chunk(chunk(renderer().message([READ])[2:4], NEW))
    journal.stop(Status.LIMIT, "user")
    journal.on_user("go on")
    journal.on_chunk(chunk(renderer().message([FINISH]), NEW, finish="stop", digest="d"))
    journal.on_results([ToolResult("", finished=True)])
    journal.close()
    session, _ = replay(path, renderer())
    assert_equal(session, journal.session)
    assert session.summary == SummaryPolicy(300, 64, 0.5)


def test_a_system_message_keeps_its_control_tokens(tmp_path):
    system = ("Tools:\n", Control("<read_file>"), " reads.")
    start(tmp_path / "s.jsonl", new_session(system=system)).close()
    session, _ = replay(tmp_path / "s.jsonl", renderer())
    assert session.system == system
    control = renderer().tokenizer.control_id("<read_file>")
    assert (session.recording.tokens == control).sum() == 1


def test_one_journal_has_one_writer(tmp_path):
    journal = start(tmp_path / "s.jsonl")
    with pytest.raises(StoreError, match="in use"):
        resume(tmp_path / "s.jsonl")
    with pytest.raises(StoreError, match="cannot be opened"):
        start(tmp_path / "s.jsonl")
    journal.close()
    journal.close()


def test_damage_before_the_end_is_told(tmp_path):
    path = tmp_path / "s.jsonl"
    play_journaled(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="damaged"):
        replay(path, renderer())


@pytest.mark.parametrize("data", [b"", b"x", b"{}\n", b"0123 {}\n"])
def test_what_is_no_journal_is_refused(tmp_path, data):
    path = tmp_path / "s.jsonl"
    path.write_bytes(data)
    with pytest.raises(StoreError, match="not the journal"):
        replay(path, renderer())
    with pytest.raises(StoreError):
        replay(tmp_path / "none.jsonl", renderer())


def test_a_session_is_resumed_with_its_own_tokenizer_only(tmp_path):
    start(tmp_path / "s.jsonl").close()
    other = Renderer(renderer().tokenizer, XmlGrammar(core_registry().schemas[:3]))
    with pytest.raises(ConfigError, match="template_digest"):
        replay(tmp_path / "s.jsonl", other)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans(), st.booleans()), max_size=8))
def test_merged_chunks_say_the_same(parts):
    chunks, first = [], 0
    for count, new, routed, stop in parts:
        routes = np.arange(first, first + count, dtype=np.uint8)[:, None, None] if routed else None
        chunks.append(
            chunk(
                range(count),
                NEW if new else OLD,
                finish="abort" if stop else None,
                routes=routes,
                first=first,
            )
        )
        first += count
    merged = merge(chunks)
    assert len(merged) <= len(chunks)

    def flat(all_chunks):
        rows = [
            (int(token), float(logprob), one.version)
            for one in all_chunks
            for token, logprob in zip(one.tokens, one.logprobs, strict=True)
        ]
        routes = {
            one.routes_start + place: row.tolist()
            for one in all_chunks
            if one.routes is not None
            for place, row in enumerate(one.routes)
        }
        return rows, routes, [one.finish for one in all_chunks if one.finish]

    assert flat(merged) == flat(chunks)


@given(st.text(max_size=30), st.sampled_from([None, *ToolErrorClass]), st.booleans())
def test_inputs_survive_json(text, error, finished):
    result = ToolResult(text, error, finished, 0.25, {"kind": "edit", "line": 3, "changed": True})
    for told in (
        ResultsIn((result,)),
        ArchivedIn(text),
        PrefixMissIn(),
        UserIn(text),
        StopIn(Status.LIMIT, text),
    ):
        assert from_document(json.loads(json.dumps(to_document(told)))) == told


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from agent_builders import *
from etude.agent import JournaledSession, LocalWorkspace, run_session
from tests.fakes.scripted import ScriptedSampler
from etude.agent.tools.state import ToolState

journal = JournaledSession.create(Path(sys.argv[2]), new_session(), ToolState())
killing = int(sys.argv[3])
events = 0

def listen(event):
    global events
    events += 1
    if events == killing:
        os.kill(os.getpid(), signal.SIGKILL)

async def run():
    sampler = ScriptedSampler(script_of([[READ], [MEND, TEST], [FINISH]]), chunk_tokens=4)
    workspace = LocalWorkspace(await new_context())
    await run_session(journal, sampler, workspace, "s", (0,), listener=listen, log=journal)

asyncio.run(run())
"""


@pytest.mark.slow
@pytest.mark.parametrize("killing", [2, 9, 14])
def test_a_session_killed_at_any_point_goes_on(tmp_path, killing):
    path = tmp_path / "s.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(path), str(killing)],
        env=environment,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    journal = resume(path)

    async def rest():
        sampler = ScriptedSampler(script_of(TURNS))
        await run_session(journal, sampler, LocalWorkspace(await new_context()), "s", (0,), log=journal)

    asyncio.run(rest())
    journal.close()
    assert journal.session.status is Status.DONE and len(journal.session.turns) == 3
    assert describe(journal.session) == describe(replay(path, renderer())[0])
    assert read_lines(path, xxh3_64_hexdigest)[1] == path.stat().st_size
