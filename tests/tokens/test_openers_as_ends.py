"""Frames in which the token that opens the next message ends an answer, as GLM's: which one the model chose
stays, in sessions, conversations that are served, recordings and fine-tuning."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.environment.recording.recording_builders import READ as READ_TOOL
from tests.tokens.chat_models import glm_tokenizer

from etude.agent import AgentSession, SessionLimits
from etude.environment.recording.session_map import MapLimits, SessionMap
from etude.protocols import RunCalls, Sample
from etude.records import PolicyVersion, SampleChunk, SamplingParams, ToolCall, ToolResult, TrajectoryId
from etude.tokens import Control, MessageStream, Renderer
from etude.tokens.chat.histories import ChatFrames
from etude.tokens.chat.messages import Answer, Call, Opening, Results, UserWords
from etude.tokens.chat_format import ChatFormat, choose_format
from etude.tokens.grammar import collect

READ = ToolCall("read_file", {"path": "a.py"})
CALL = "<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n</tool_call>"
ASKED = Answer("I look.", (Call("c", "read_file", {"path": "a.py"}),))


@cache
def glm() -> ChatFormat:
    return choose_format(glm_tokenizer())


@cache
def renderer() -> Renderer:
    return replace(glm(), tools=(READ_TOOL,), system="Be brief.").renderer()


def answer(text: str, end: str = "") -> list[int]:
    pieces = [*renderer().grammar.split(text), *([Control(end)] if end else [])]
    return renderer().encode(pieces).tolist()


def chunk(tokens: list[int], finish: str = "stop") -> SampleChunk:
    version = PolicyVersion("run", 0)
    return SampleChunk(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), version, version,
                       finish=finish)  # fmt: skip


def new_session(**limits: Any) -> AgentSession:
    return AgentSession("Fix it.", renderer(), TrajectoryId("run", "t", 0, 0, 0), SessionLimits(**limits))


def decoded(tokens: Any) -> str:
    return renderer().tokenizer.decode(tokens)


def test_an_answer_may_end_with_any_token_that_opens_what_follows() -> None:
    assert glm().grammar == "glm_xml"
    assert glm().tokenizer.chat_template == glm_tokenizer().chat_template
    ends = {renderer().tokenizer.control_id(name) for name in ("<|user|>", "<|observation|>")}
    assert renderer().end_tokens == ends
    sample = new_session().next_action()
    assert isinstance(sample, Sample) and sample.stop_tokens == ends


@pytest.mark.parametrize("end", ["<|observation|>", "<|user|>"])
def test_the_end_that_was_sampled_stays_and_the_right_opener_follows_a_wrong_one(end: str) -> None:
    session = new_session()
    prompt, sampled = session.recording.tokens.tolist(), answer(f"\n<think></think>\nI look.\n{CALL}", end)
    session.on_chunk(chunk(sampled))
    assert session.next_action() == RunCalls((READ,))
    session.on_results([ToolResult("1\tx")])
    tokens = session.recording.tokens.tolist()
    assert tokens[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    opener = "" if end == "<|observation|>" else "<|observation|>"
    assert decoded(tokens[len(prompt) + len(sampled) :]) == (
        f"{opener}\n<tool_response>\n1\tx\n</tool_response><|assistant|>"
    )
    (segment,) = session.segments()
    assert segment.sampled.tolist() == [
        place in range(len(prompt), len(prompt) + len(sampled)) for place in range(len(tokens))
    ]


def test_an_answer_that_a_limit_cut_is_closed_by_what_follows_and_not_trained_on() -> None:
    sampled = answer("\n<think>Why")
    session = new_session(max_message_tokens=len(sampled))
    start = session.recording.length
    session.on_chunk(chunk(sampled, "length"))
    session.on_user("Go on.")
    (segment,) = session.segments()
    assert decoded(segment.tokens[start:]) == "\n<think>Why<|user|>\nGo on.<|assistant|>"
    assert int(segment.sampled.sum()) == len(sampled)


def test_what_a_stream_says_depends_neither_on_the_cuts_nor_on_which_token_ends_it() -> None:
    for end in ("<|user|>", "<|observation|>", ""):
        sampled = np.array(answer(f"\n<think>Why?</think>\nSo.\n{CALL}", end), np.int32)
        said = renderer().read(sampled)
        assert (said.reasoning, said.text, said.calls) == ("Why?", "\n\nSo.\n", (READ,))
        for size in range(1, len(sampled)):
            stream = MessageStream(renderer())
            parts = [sampled[place : place + size] for place in range(0, len(sampled), size)]
            events = [event for part in parts for event in stream.feed(part)]
            assert collect([*events, *stream.finish()]) == said


def test_other_programs_end_answers_with_the_same_tokens(tmp_path: Path) -> None:
    glm().tokenizer.save(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert set(stored["eos_token_id"]) == renderer().end_tokens
    again = choose_format(glm().tokenizer)
    assert (again.digest, again.tokenizer) == (glm().digest, glm().tokenizer)


def test_calls_as_hermes_has_them_stand_in_the_same_frame() -> None:
    learnt = choose_format(glm_tokenizer(), grammar="hermes")
    assert learnt.template == glm().template and learnt.grammar == "hermes"
    assert learnt.tokenizer.chat_template != glm_tokenizer().chat_template
    assert choose_format(learnt.tokenizer).digest == learnt.digest


def test_scripted_answers_end_with_the_opener_of_results_where_they_call_a_tool() -> None:
    assert decoded(renderer().message(["Done."])) == "\n<think></think>\nDone.<|user|>"
    assert decoded(renderer().message([READ])) == f"\n<think></think>\n{CALL}<|observation|>"
    assert decoded(renderer().message([f"<think>So.</think>{CALL[:-3]}"])).startswith("<think>So.")


@pytest.mark.parametrize("end", ["<|observation|>", "<|user|>", ""])
def test_a_served_conversation_goes_on_from_the_tokens_that_were_sampled(end: str) -> None:
    frames = ChatFrames(glm().renderers())
    opening = Opening("Be brief.", ())
    prompt = frames.prompt([opening, UserWords("Fix it.")], "key")
    sampled = answer("\n<think>Why?</think>\nI  look.", end)
    frames.remember(prompt, Answer("I  look."), np.array(sampled, np.int32))
    talk = [opening, UserWords("Fix it."), Answer("I  look."), UserWords("Go on.")]
    tokens = frames.prompt(talk, "key").tokens.tolist()
    assert tokens[: len(prompt.tokens) + len(sampled)] == [*prompt.tokens.tolist(), *sampled]
    opener = "" if end == "<|user|>" else "<|user|>"
    assert decoded(tokens[len(prompt.tokens) + len(sampled) :]) == f"{opener}\nGo on.<|assistant|>"
    others = decoded(frames.prompt(talk, "another").tokens)
    assert others.endswith("<|assistant|>\n<think></think>\nI  look.<|user|>\nGo on.<|assistant|>")


@pytest.mark.parametrize("end", ["<|observation|>", "<|user|>", ""])
def test_a_recorded_branch_grows_behind_the_end_that_was_sampled(end: str) -> None:
    session_map = SessionMap("run/t/e0/g0/0", glm().renderers().find, MapLimits(), True)
    talk = [Opening("Be brief.", ()), UserWords("Fix it.")]
    first = session_map.begin(talk, SamplingParams())
    start = len(first.tokens)
    sampled = answer("\n<think></think>\nI look.", end)
    session_map.commit(first, [chunk(sampled, "stop" if end else "length")], Answer("I look."))
    talk += [Answer("I look."), Results(("1\tx",))]
    measured = session_map.measure(talk, SamplingParams())
    second = session_map.begin(talk, SamplingParams())
    assert second.branch is first.branch and len(second.tokens) == measured
    assert second.tokens[start : start + len(sampled)].tolist() == sampled
    opener = "" if end == "<|observation|>" else "<|observation|>"
    rest = decoded(second.tokens[start + len(sampled) :])
    assert rest == f"{opener}\n<tool_response>\n1\tx\n</tool_response><|assistant|>"
