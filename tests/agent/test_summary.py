import asyncio
import re

import numpy as np
import pytest
from agent_builders import (
    FINISH,
    READ,
    TEST,
    chunk,
    contents,
    new_context,
    new_session,
    renderer,
    replace_files,
    run_script,
)
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.scripted import ScriptedSampler

from etude.agent import LocalWorkspace, SessionLimits, SummaryPolicy, run_session
from etude.agent.summary import cut_middle, shorten_texts
from etude.errors import ConfigError
from etude.protocols import Archive, Finished, Sample
from etude.records import Relation, Status, ToolResult
from etude.sandbox.errors import DiskFullError

POLICY = SummaryPolicy(at_tokens=120, max_summary_tokens=24, request="sum up")
LIMITS = SessionLimits(max_turns=100, max_tokens=300, max_message_tokens=40)


def counting(parts):
    """A script that reads until its summaries say that it has read often enough, and summarises its count."""
    end, tokenizer = renderer().template.end, renderer().tokenizer

    def script(session_id, context):
        text = tokenizer.decode(context)
        before = re.search(r"count (\d+)", text)
        read = text.count("<read_file>") + (int(before[1]) if before else 0)
        if "sum up" in text:
            return renderer().encode([f"count {read} ", end])
        return renderer().message([FINISH] if read >= parts else [READ])

    return script


def summarised(parts=20, policy=POLICY, limits=LIMITS, **arguments):
    session = new_session(limits, summary=policy)
    return run_script([], session, ScriptedSampler(counting(parts), **arguments))


def test_a_session_goes_on_for_many_contexts():
    session, context = summarised()
    assert session.status is Status.DONE
    assert session.facts.num_summaries == len(session.contexts) - 1 >= 3
    assert session.facts.num_calls == 21
    assert all(one.recording.length <= LIMITS.max_tokens for one in session.contexts)
    kept = [path for path in contents(context) if path.startswith(".etude/history/")]
    assert len(kept) == session.facts.num_summaries
    first = contents(context)[".etude/history/001.md"].decode()
    assert first.startswith("test_tally fails\n") and "<read_file>" in first and "def tally" in first


def test_each_context_is_a_segment_of_one_chain():
    session, _ = summarised(route_shape=(2, 2))
    trajectory = session.trajectory()
    first, *rest = trajectory.segments
    assert (first.relation, first.parent) == (Relation.ROOT, None)
    for before, segment in zip(trajectory.segments, rest, strict=False):
        assert (segment.relation, segment.parent) == (Relation.SUMMARY, (before.id, len(before.tokens)))
        text = renderer().tokenizer.decode(segment.tokens)
        assert "test_tally fails" in text and ".etude/history/" in text
    assert {turn.segment_id for turn in trajectory.turns} == {segment.id for segment in trajectory.segments}


def test_summaries_are_sampled_and_credited():
    session, _ = summarised()
    segment = session.segments()[0]
    last = segment.turn_spans[-1]
    assert last.role == "assistant"
    assert segment.sampled[last.start : last.end].all()
    assert "count" in renderer().tokenizer.decode(segment.tokens[last.start : last.end])
    covered = sum(span.end - span.start for span in segment.version_spans)
    assert covered == int(segment.sampled.sum())


def test_contexts_have_noise_of_their_own():
    session = new_session(LIMITS, summary=POLICY)
    sampler = ScriptedSampler(counting(20))
    run_script([], session, sampler)
    keys = {request.rng_key for request in sampler.requests}
    assert keys == {(7, 1, number) for number in range(len(session.contexts))}


def test_without_summaries_a_full_context_ends_the_session():
    session, _ = summarised(policy=None)
    assert (session.status, session.cause) == (Status.LIMIT, "tokens")


def test_after_the_last_allowed_summary_a_full_context_ends_the_session():
    policy = SummaryPolicy(at_tokens=120, max_summary_tokens=24, request="sum up", max_summaries=2)
    session, _ = summarised(policy=policy)
    assert (session.status, session.cause) == (Status.LIMIT, "tokens")
    assert len(session.contexts) == 3


def test_a_summary_that_is_too_long_is_cut_and_used():
    end = renderer().template.end

    def endless(session_id, context):
        if "sum up" in renderer().tokenizer.decode(context):
            return renderer().encode(["x " * 100, end])
        return renderer().message([READ])

    session = new_session(SessionLimits(max_turns=4, max_tokens=300, max_message_tokens=40), summary=POLICY)
    run_script([], session, ScriptedSampler(endless))
    first = session.segments()[0]
    assert first.turn_spans[-1].end - first.turn_spans[-1].start == POLICY.max_summary_tokens
    assert "x x x" in session.contexts[1].opening
    assert (session.status, session.cause) == (Status.LIMIT, "turns")


def test_answers_too_long_for_the_context_are_cut_and_summarised():
    session = new_session(LIMITS, summary=POLICY)
    session.on_chunk(chunk(renderer().message([READ]), finish="stop", digest="d"))
    session.on_results([ToolResult("word " * 3000)])
    assert session.progress.summarising
    text = renderer().tokenizer.decode(session.recording.tokens)
    assert "... cut ..." in text and "sum up" in text
    action = session.next_action()
    assert isinstance(action, Sample) and action.summarising
    assert action.params.max_tokens == POLICY.max_summary_tokens


def test_to_do_lists_outlive_their_context():
    session = new_session(LIMITS, summary=POLICY)
    session.on_chunk(chunk(renderer().message([READ]), finish="stop", digest="d"))
    session.on_results([ToolResult("ok " * 200, facts={"kind": "todo", "todos": "[ ] mend tally"})])
    session.on_chunk(
        chunk(renderer().encode(["half done", renderer().template.end]), finish="stop", digest="e")
    )
    action = session.next_action()
    assert isinstance(action, Archive) and action.path == ".etude/history/001.md"
    session.on_archived()
    assert session.contexts[1].opening.endswith("half done\n\nTo do:\n[ ] mend tally")
    following = session.next_action()
    assert isinstance(following, Sample) and (following.known, following.prefix_digest) == (0, None)


def test_a_history_that_cannot_be_kept_is_told_and_the_session_goes_on():
    class Full:
        def __init__(self, files):
            self.files = files

        async def read(self, path, limit_bytes=0):
            return await self.files.read(path, limit_bytes)

        async def write(self, path, data):
            raise DiskFullError("the disk is full")

    session = new_session(LIMITS, summary=POLICY)

    async def run():
        context = await new_context()
        replace_files(context, Full(context.sandbox.files))
        await run_session(session, ScriptedSampler(counting(6)), LocalWorkspace(context), "s", (0,))

    asyncio.run(run())
    assert session.status is Status.DONE
    assert "could not be kept: the disk is full" in session.contexts[1].opening


def test_triggers_are_drawn_for_each_context_and_always_the_same():
    policy = SummaryPolicy(at_tokens=1000, jitter=0.5)
    drawn = [policy.trigger("run/task/e0/g0/1", number) for number in range(50)]
    assert drawn == [policy.trigger("run/task/e0/g0/1", number) for number in range(50)]
    assert len(set(drawn)) > 40 and 500 <= min(drawn) < 600 and 900 < max(drawn) <= 1000
    assert SummaryPolicy(at_tokens=1000).trigger("x", 3) == 1000


def test_limits_that_leave_no_room_for_a_summary_are_refused():
    with pytest.raises(ConfigError, match="do not fit"):
        new_session(SessionLimits(max_tokens=150, max_message_tokens=40), summary=POLICY)
    for name, value in {"at_tokens": 0, "jitter": 1.0, "max_summary_tokens": 0, "max_summaries": -1}.items():
        with pytest.raises(ConfigError, match=name):
            SummaryPolicy(**{"at_tokens": 10, name: value})


def test_the_limit_of_all_contexts_together_ends_the_session():
    limits = SessionLimits(max_turns=100, max_tokens=300, max_message_tokens=40, max_session_tokens=500)
    session, _ = summarised(limits=limits)
    assert (session.status, session.cause) == (Status.LIMIT, "tokens")
    assert session.num_tokens <= 500


def test_more_words_of_the_user_continue_a_finished_session():
    session, _ = run_script([[READ], [FINISH]])
    length = session.recording.length
    session.on_user("now the other one")
    action = session.next_action()
    assert isinstance(action, Sample) and session.status is None
    added = renderer().tokenizer.decode(action.tokens[length:])
    assert added == "<|tool|><result></result><|end|><|user|>now the other one<|end|><|assistant|>"
    assert not session.recording.sampled[length:].any()


def test_words_after_a_stop_close_what_was_open():
    session = new_session()
    session.on_chunk(chunk(renderer().message([TEST])[:-1]))
    session.stop(Status.LIMIT, "user")
    assert session.next_action() == Finished(Status.LIMIT, "user")
    session.on_user("go on")
    text = renderer().tokenizer.decode(session.recording.tokens)
    assert text.endswith("</run_tests><|end|><|user|>go on<|end|><|assistant|>")
    sampled = session.recording.sampled
    assert int(sampled.sum()) == len(renderer().message([TEST])) - 1

    pending = new_session()
    pending.on_chunk(chunk(renderer().message([TEST, READ]), finish="stop", digest="d"))
    pending.stop(Status.LIMIT, "user")
    pending.on_user("go on")
    text = renderer().tokenizer.decode(pending.recording.tokens)
    assert text.count("<result>error: stopped</result>") == 2


@pytest.mark.parametrize("sampled", [0, 2, None])
def test_a_session_stopped_in_its_summary_goes_on_with_what_there_is(sampled):
    session = new_session(LIMITS, summary=POLICY)
    session.on_chunk(chunk(renderer().message([READ]), finish="stop", digest="d"))
    session.on_results([ToolResult("ok " * 200)])
    words = renderer().encode(["half of it done", renderer().template.end])
    if sampled is None:
        session.on_chunk(chunk(words, finish="stop", digest="e"))
    elif sampled:
        session.on_chunk(chunk(words[:sampled]))
    session.stop(Status.LIMIT, "user")
    session.on_user("and test_empty")
    action = session.next_action()
    if sampled == 0:
        assert isinstance(action, Sample) and action.summarising
        session.on_chunk(chunk(words, finish="stop", digest="e"))
        action = session.next_action()
    assert isinstance(action, Archive)
    session.on_archived()
    assert session.facts.num_summaries == 1 and len(session.contexts) == 2
    assert session.contexts[1].opening.startswith("test_tally fails\n\nand test_empty\n\n[context 2;")
    assert isinstance(session.next_action(), Sample) and session.status is None


def test_all_words_of_the_user_reach_the_next_context():
    session = new_session(LIMITS, summary=POLICY)
    run_script([], session, ScriptedSampler(counting(1)))
    session.on_user("and test_empty")
    run_script([], session, ScriptedSampler(counting(9)))
    assert session.contexts[-1].opening.startswith("test_tally fails\n\nand test_empty\n\n[context ")


@given(st.lists(st.text(max_size=60), max_size=5), st.integers(0, 200))
def test_shortened_texts_fit_and_short_ones_stay_whole(texts, room):
    def fits(candidates):
        return sum(len(text) for text in candidates) <= room

    short = shorten_texts(texts, fits)
    assert short is not None and fits(short)
    if fits(texts):
        assert short == texts
    longest = max((len(text) for text in short), default=0)
    assert all(new == old for new, old in zip(short, texts, strict=True) if len(old) < longest)


def test_nothing_fits_where_even_nothing_is_too_long():
    assert shorten_texts(["abc"], lambda texts: False) is None


@given(st.text(max_size=100), st.integers(0, 120))
def test_a_cut_text_has_the_length_asked_for(text, length):
    cut = cut_middle(text, length)
    assert len(cut) <= length and (cut == text) == (len(text) <= length)


def test_summarised_sessions_are_bit_equal_however_tokens_come():
    one, _ = summarised(chunk_tokens=1, route_shape=(2, 2))
    two, _ = summarised(chunk_tokens=0, route_shape=(2, 2))
    for first, second in zip(one.segments(), two.segments(), strict=True):
        assert np.array_equal(first.tokens, second.tokens)
    for first, second in zip(one.contexts, two.contexts, strict=True):
        routes, others = first.recording.routes(), second.recording.routes()
        assert routes is not None and others is not None and np.array_equal(routes, others)
