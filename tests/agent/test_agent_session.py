import numpy as np
import pytest
from agent_builders import FINISH, MEND, NEW, OLD, READ, TEST, chunk, new_session, renderer, run_script
from tests.tokens.chat_models import channels_tokenizer

from etude.agent import AgentSession, SessionFacts, SessionLimits
from etude.errors import ConfigError, SamplerError
from etude.protocols import Finished, RunCalls, Sample
from etude.records import (
    NATIVE_ROUTE,
    BlobRef,
    SampleChunk,
    SamplingParams,
    Status,
    ToolCall,
    ToolErrorClass,
    ToolResult,
    TrajectoryId,
)
from etude.tokens import Renderer
from etude.tokens.chat_format import choose_format


def say(session, *parts, digest="d"):
    session.on_chunk(chunk(renderer().message(parts), finish="stop", digest=digest))


def answer(session, *outputs):
    session.on_results([ToolResult(output) for output in outputs])


def test_a_message_is_sampled_run_and_observed():
    session = new_session()
    action = session.next_action()
    assert isinstance(action, Sample) and action is session.next_action()
    assert action.known == 0 and action.prefix_digest is None
    say(session, READ)
    assert session.next_action() == RunCalls((READ,))
    answer(session, "1\tx")
    action = session.next_action()
    assert isinstance(action, Sample)
    prompt, message = renderer().prompt("test_tally fails"), renderer().message([READ])
    observed = renderer().observations(["1\tx"])
    assert np.array_equal(action.tokens, np.concatenate([prompt, message, observed]))
    assert action.known == len(prompt) + len(message) and action.prefix_digest == "d"


def test_sampled_tokens_are_kept_as_sampled():
    session = new_session()
    start = session.recording.length
    byte_by_byte = [renderer().tokenizer.encode(bytes([b]))[0] for b in b"<finish>"]
    tokens = [*byte_by_byte, renderer().end_token]
    session.on_chunk(chunk(tokens[:3]))
    session.on_chunk(chunk(tokens[3:], version=NEW, finish="stop", kv_oldest=OLD))
    segment = session.segments()[0]
    assert segment.tokens[start:].tolist() == tokens
    assert segment.sampled.tolist() == [False] * start + [True] * len(tokens)
    assert segment.logprobs[start:].tolist() == [-1, -2, -3, *(-np.arange(1.0, 7.0)).tolist()]
    assert [(s.start - start, s.end - start, s.version.step) for s in segment.version_spans] == [
        (0, 3, 1),
        (3, 9, 2),
    ]
    assert [(s.start - start, s.end - start) for s in segment.kv_oldest_spans] == [(0, 9)]
    assert segment.turn_spans[-1].role == "assistant" and segment.turn_spans[-1].start == start


def test_finish_ends_the_session_and_calls_before_it_run():
    session = new_session()
    say(session, TEST, FINISH, READ)
    action = session.next_action()
    assert isinstance(action, RunCalls)
    assert [call.error for call in action.calls] == [None, None, "after finish"]
    length = session.recording.length
    session.on_results([ToolResult("2 passed"), ToolResult("", finished=True), ToolResult("error: ...")])
    assert session.next_action() == Finished(Status.DONE)
    assert session.recording.length == length


def test_a_turn_without_calls_is_told_so():
    session = new_session()
    say(session, "hm")
    assert session.next_action() == RunCalls((ToolCall("", error="no call"),))
    answer(session, "error: no call")
    assert session.facts.malformed == 1


def test_calls_above_the_limit_get_one_error():
    session = new_session(SessionLimits(max_calls_per_turn=2))
    say(session, *[TEST] * 5)
    assert session.next_action() == RunCalls((TEST, TEST, ToolCall("run_tests", error="more than 2 calls")))


def test_a_turn_knows_the_tokens_of_its_malformed_calls():
    broken = "<read_file><path>a</read_file>"
    limits = SessionLimits(max_calls_per_turn=3)

    def found(*parts, limits=limits):
        """Text of each span, which begins and ends within the message."""
        session = new_session(limits)
        say(session, *parts)
        (turn,) = session.turns
        tokens = session.recording.tokens
        assert all(turn.start <= start < end <= turn.end for start, end in turn.malformed)
        return [renderer().tokenizer.decode(tokens[start:end]) for start, end in turn.malformed]

    assert found("let me see", READ) == []
    (span,) = found("let me see ", broken, READ)
    assert span.startswith("<read_file>") and "see" not in span and "tally" not in span
    end = renderer().template.end.name
    assert found("hm, nothing to do") == [end], "the decision to stop without a call"
    late = renderer().tokenizer.decode(renderer().message([TEST, TEST])).removesuffix(end)
    assert found(*[TEST] * 5) == [late], "calls above the limit, which get one error"
    session = new_session()
    say(session, TEST, FINISH, READ)
    assert len(session.turns[0].malformed) == 1, "a call after the end"


def test_limits_end_the_session_with_their_name():
    turns = new_session(SessionLimits(max_turns=1))
    say(turns, READ)
    answer(turns, "x")
    assert turns.next_action() == Finished(Status.LIMIT, "turns")

    tokens = new_session(SessionLimits(max_tokens=60))
    say(tokens, READ)
    answer(tokens, "a b c d e f g h " * 10)
    assert tokens.next_action() == Finished(Status.LIMIT, "tokens")
    assert tokens.recording.length <= 60

    message = new_session(SessionLimits(max_message_tokens=4))
    action = message.next_action()
    assert isinstance(action, Sample) and action.params.max_tokens == 4
    message.on_chunk(chunk(renderer().message([FINISH, FINISH])[:4], finish="length"))
    assert message.next_action() == Finished(Status.LIMIT, "message")
    assert len(message.turns) == 1 and message.turns[0].calls == ()


def test_an_agent_that_calls_nothing_is_ended():
    session = new_session(SessionLimits(max_idle_turns=2))
    for words in ("hm", "still thinking"):
        assert session.status is None
        say(session, words)
        answer(session, "error: no call")
    assert session.next_action() == Finished(Status.LIMIT, "no call")
    session.on_user("call a tool")
    say(session, "hm")
    answer(session, "error: no call")
    say(session, READ)
    answer(session, "x")
    say(session, "hm")
    answer(session, "error: no call")
    assert session.status is None


def test_a_message_may_use_what_the_context_has_left():
    session = new_session(SessionLimits(max_tokens=40, max_message_tokens=128))
    action = session.next_action()
    assert isinstance(action, Sample)
    room = 40 - session.recording.length
    assert action.params.max_tokens == room
    session.on_chunk(chunk([5] * room, finish="length"))
    assert session.next_action() == Finished(Status.LIMIT, "tokens")


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(ConfigError, match="does not fit the context"):
        new_session(SessionLimits(max_tokens=4))


def test_an_aborted_message_is_continued():
    session = new_session(SessionLimits(max_message_tokens=10))
    message = renderer().message([READ])
    session.on_chunk(chunk(message[:2], finish="abort", digest="half"))
    action = session.next_action()
    assert isinstance(action, Sample)
    assert (action.known, action.prefix_digest, action.params.max_tokens) == (len(action.tokens), "half", 8)
    session.on_chunk(chunk(message[2:], finish="stop", digest="whole"))
    assert session.next_action() == RunCalls((READ,))
    assert len(session.turns) == 1


def test_stopping_ends_a_session_once():
    session = new_session()
    session.stop(Status.LIMIT, "time")
    session.stop(Status.INFRASTRUCTURE, "late")
    session.on_chunk(chunk([1, 2], finish="stop"))
    assert session.next_action() == Finished(Status.LIMIT, "time")
    assert not session.segments()[0].sampled.any()


def routes_of(count, start=0):
    return np.arange(start, start + count, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2)


def test_routes_cover_every_position_but_the_last():
    session = new_session()
    prompt = session.recording.length
    message = renderer().message([FINISH])
    session.on_chunk(chunk(message[:1], routes=routes_of(prompt)))
    session.on_chunk(chunk(message[1:], finish="stop", digest="d", routes=routes_of(2, prompt), first=prompt))
    routes = session.recording.routes()
    assert routes is not None and routes.shape == (prompt + 3, 2, 2)
    assert routes[:-1, 0, 0].tolist() == list(range(prompt + 2))
    assert (routes[-1] == NATIVE_ROUTE).all()
    segment = session.segments(lambda kept: BlobRef("memory:1", "", "uint8", kept.shape))[0]
    assert segment.routes is not None and segment.routes.shape == routes.shape


def test_recomputed_positions_replace_their_routes():
    session = new_session()
    prompt = session.recording.length
    say_routes = routes_of(prompt + 1)
    session.on_chunk(chunk(renderer().message(["hm"])[-2:], finish="stop", digest="d", routes=say_routes))
    answer(session, "error: no call")
    session.on_prefix_miss()
    action = session.next_action()
    assert isinstance(action, Sample) and action.known == 0 and action.prefix_digest is None
    length = len(action.tokens)
    session.on_chunk(chunk([renderer().end_token], finish="stop", digest="e", routes=routes_of(length, 9)))
    routes = session.recording.routes()
    assert routes is not None and routes[:length, 0, 0].tolist() == [9 + n for n in range(length)]


def test_routes_stay_when_the_sampler_keeps_nothing():
    session = new_session()
    prompt = session.recording.length
    say(session, "hm", digest="")
    session = new_session()
    session.on_chunk(chunk(renderer().message([FINISH]), finish="stop", routes=routes_of(prompt + 2)))
    action = session.next_action()
    assert isinstance(action, RunCalls)
    routes = session.recording.routes()
    assert routes is not None and (routes[:-1] != NATIVE_ROUTE).all()


def test_chunks_whose_parts_do_not_fit_are_refused():
    session = new_session()
    prompt = session.recording.tokens
    with pytest.raises(SamplerError, match="positions"):
        session.on_chunk(chunk([1], routes=routes_of(200)))
    assert session.recording.tokens.tolist() == prompt.tolist(), "nothing of a refused chunk is kept"
    broken = SampleChunk(np.zeros(2, np.int32), np.zeros(1, np.float32), OLD, OLD)
    with pytest.raises(SamplerError, match="logprobs"):
        new_session().on_chunk(broken)


def test_long_sessions_outgrow_their_first_arrays():
    session = new_session(SessionLimits(max_tokens=5000, max_message_tokens=5000))
    session.contexts[-1].recording = type(session.recording)(4)
    session.recording.append_given(np.arange(3, dtype=np.int32), "user")
    for start in range(0, 300, 100):
        number = start // 100
        session.on_chunk(chunk(range(start, start + 100), routes=routes_of(1, number), first=number))
    assert session.recording.tokens[3:].tolist() == list(range(300))
    routes = session.recording.routes()
    assert routes is not None and routes[:3, 0, 0].tolist() == [0, 1, 2]
    assert session.recording.sampled.tolist() == [False] * 3 + [True] * 300


def test_facts_count_what_monitors_ask_for():
    session, _ = run_script([[READ], ["<read_file>"], [MEND, TEST], [TEST, FINISH]])
    facts = session.facts.to_dict()
    expected = {
        "num_turns": 4,
        "num_calls": 5,
        "parallel_turns": 2,
        "malformed": 1,
        "num_edits": 1,
        "edits_after_read": 1,
        "num_test_runs": 2,
        "finished": True,
        "first_edit_right": True,
        "last_tests_green": True,
    }
    assert {name: facts[name] for name in expected} == expected


def test_a_second_edit_before_any_test_spoils_the_first():
    wrong = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "2", "text": "    total = 2"})
    session, _ = run_script([[wrong, MEND, TEST], [FINISH]])
    facts = session.facts
    assert (facts.num_edits, facts.edits_after_read, facts.first_edit_right) == (2, 0, False)
    session, _ = run_script([[wrong, TEST, MEND, TEST], [FINISH]])
    assert session.facts.first_edit_right is False and session.facts.last_tests_green


def test_a_read_in_the_same_turn_comes_too_late_for_an_edit():
    session, _ = run_script([[READ, MEND], [MEND, FINISH]])
    assert (session.facts.num_edits, session.facts.edits_after_read) == (1, 0)


def test_only_the_first_test_run_judges_the_first_edit():
    facts = SessionFacts()
    edit = ToolResult("ok", facts={"kind": "edit", "path": "a", "line": 1, "changed": True})
    red, green = (ToolResult("", facts={"kind": "test", "green": passed}) for passed in (False, True))
    facts.on_turn([MEND, TEST, TEST], [edit, red, green])
    assert facts.first_edit_right is False and facts.last_tests_green


def test_results_that_leave_no_room_for_a_message_are_not_appended():
    probe = new_session()
    say(probe, READ)
    answer(probe, "x")
    full = probe.recording.length
    for limit, status in ((full, Status.LIMIT), (full + 1, None)):
        session = new_session(SessionLimits(max_tokens=limit))
        say(session, READ)
        length = session.recording.length
        answer(session, "x")
        assert session.status is status
        assert session.recording.length == (length if status else full)


def test_a_sampler_that_keeps_nothing_gets_everything_again():
    session = new_session()
    say(session, READ, digest="")
    answer(session, "x")
    action = session.next_action()
    assert isinstance(action, Sample) and (action.known, action.prefix_digest) == (0, None)


def test_system_messages_come_first():
    session = new_session(system="Be brief.")
    assert [span.role for span in session.recording.turn_spans] == ["system", "user"]
    expected = renderer().prompt("test_tally fails", system="Be brief.")
    assert np.array_equal(session.recording.tokens, expected)


def test_sampling_parameters_reach_the_request_and_the_record():
    params = SamplingParams(temperature=0.5, max_tokens=9)
    session = new_session(params=params)
    action = session.next_action()
    assert isinstance(action, Sample)
    assert (action.params.temperature, action.params.max_tokens) == (0.5, 9)
    assert session.segments()[0].sampling == params


def test_facts_count_commands_questions_to_dos_errors_and_comments():
    facts = SessionFacts()
    write = ToolCall("write_file", {"path": "a", "text": "# why not\nx = 1\n"})
    patch = ToolCall("apply_patch", {"patch": "--- a\n+++ b\n-old\n+# so\n+y = 2\n"})
    edited = ToolResult("ok", facts={"kind": "edit", "path": "a", "line": 1, "changed": True})
    facts.on_turn([write, patch], [edited, edited])
    assert (facts.written_characters, facts.comment_characters) == (7 + 3 + 3 + 3, 7 + 3)
    results = [
        ToolResult("", ToolErrorClass.TIMEOUT, facts={"kind": "command"}),
        ToolResult("", facts={"kind": "question"}),
        ToolResult("", facts={"kind": "todo", "todos": "[ ] 1 a\n[>] 2 b\n[x] 3 c\n[-] 4 d"}),
        ToolResult("", ToolErrorClass.TIMEOUT),
    ]
    facts.on_turn([ToolCall("any")] * 4, results)
    assert (facts.num_commands, facts.num_questions, facts.open_todos) == (1, 1, 2)
    assert facts.errors_by_class == {"timeout": 2} and facts.tool_errors == 2


@pytest.mark.parametrize("by_person", [True, False])
def test_words_after_the_last_message_that_is_allowed_end_a_run_at_its_limit(by_person):
    session = new_session(SessionLimits(max_turns=1))
    say(session, FINISH)
    session.on_results([ToolResult("ok", finished=True)])
    assert session.next_action() == Finished(Status.DONE)
    session.on_user("and now the other one", by_person=by_person)
    action = session.next_action()
    assert isinstance(action, Sample) if by_person else action == Finished(Status.LIMIT, "turns")


def test_plain_words_end_a_session_that_a_person_reads():
    limits = SessionLimits(max_idle_turns=2, words_end=True)
    session = new_session(limits)
    say(session, READ)
    answer(session, "x")
    say(session, "It returns 3.")
    assert session.next_action() == Finished(Status.DONE)
    length = session.recording.length
    session.on_user("why?")
    assert session.recording.tokens[length:].tolist() == [
        *session.renderer.user_message("why?").tolist(),
    ]
    say(session, "<read_file><path>x</read_file>")
    assert isinstance(session.next_action(), RunCalls)
    assert session.harness_digest == new_session(SessionLimits(max_idle_turns=2)).harness_digest


def test_an_empty_message_is_no_answer():
    session = new_session(SessionLimits(words_end=True))
    say(session, " \n")
    assert session.next_action() == RunCalls((ToolCall("", error="no call"),))


def in_channels():
    return choose_format(channels_tokenizer()).renderer()


def in_marks():
    tokenizer = renderer().tokenizer.with_control_tokens(["<think>", "</think>"])
    return Renderer(tokenizer, renderer().grammar)


@pytest.mark.parametrize("make", [in_channels, in_marks])
def test_a_message_that_only_reasons_is_no_answer(make):
    own = make()
    limits = SessionLimits(words_end=True)
    session = AgentSession("why?", own, TrajectoryId("run", "task", 0, 0, 0), limits)

    def sample(*pieces):
        session.on_chunk(chunk(own.encode([*pieces, own.template.end]), finish="stop"))

    sample(*own.mark_reasoning("It may be the sum."))
    assert session.next_action() == RunCalls((ToolCall("", error="no call"),))
    answer(session, "error: no call")
    sample(*own.mark_reasoning("It is."), "It is the sum.")
    assert session.next_action() == Finished(Status.DONE)


def test_results_that_were_shown_are_not_shown_again():
    session = new_session()
    say(session, READ)
    answer(session, "the file")
    length = session.recording.length
    session.stop(Status.LIMIT, "turns")
    session.on_user("go on")
    added = session.renderer.tokenizer.decode(session.recording.tokens[length:])
    assert "go on" in added and "the file" not in added
