"""Families that number the calls of a conversation, as Kimi-K2 does, and whose results name them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.environment.recording.recording_builders import READ as READ_TOOL
from tests.tokens.chat_models import KIMI, kimi_tokenizer

from etude.agent import AgentSession, SessionLimits
from etude.records import PolicyVersion, SampleChunk, ToolCall, ToolResult, TrajectoryId
from etude.tokens import Renderer
from etude.tokens.chat.framing import Framing
from etude.tokens.chat.histories import ChatFrames
from etude.tokens.chat.messages import Answer, Opening
from etude.tokens.chat.openai_chat import read_messages, read_tools
from etude.tokens.chat_format import ChatFormat, choose_format
from etude.tokens.chat_template import write_chat_template

READ = ToolCall("read_file", {"path": "a.py"})
RESTARTING = KIMI.replace("+ call.id +", "+ 'functions.' + call.function.name + ':' + loop.index0 | string +")
USER = {"role": "user", "content": "Fix it."}


def turn(*numbers: int) -> list[dict[str, Any]]:
    """An answer with calls, and their results."""
    function = {"name": "read_file", "arguments": {"path": "a.py"}}
    ids = [f"functions.read_file:{number}" for number in numbers]
    calls = [{"type": "function", "id": one, "function": function} for one in ids]
    results = [{"role": "tool", "tool_call_id": one, "content": "1\tx"} for one in ids]
    return [{"role": "assistant", "content": "I look.", "tool_calls": calls}, *results]


@cache
def kimi(template: str = KIMI) -> ChatFormat:
    return choose_format(kimi_tokenizer(template))


@cache
def renderer(template: str = KIMI) -> Renderer:
    return replace(kimi(template), tools=(READ_TOOL,), system="Be brief.").renderer()


def new_session(template: str) -> AgentSession:
    name = TrajectoryId("run", "t", 0, 0, 0)
    return AgentSession(
        "Fix it.", renderer(template), name, SessionLimits(max_calls_per_turn=2, max_tokens=4096)
    )


def say(session: AgentSession, tokens: Any, *outputs: str) -> str:
    """An answer and its results: what follows it."""
    version = PolicyVersion("run", 0)
    chunk = SampleChunk(tokens, np.zeros(len(tokens), np.float32), version, version, finish="stop")
    session.on_chunk(chunk)
    session.next_action()
    start = session.recording.length
    session.on_results([ToolResult(output) for output in outputs])
    return session.renderer.tokenizer.decode(session.recording.tokens[start:])


def of(number: int, output: str, name: str = "read_file") -> str:
    opened = "<|im_system|>tool<|im_middle|>## Return of functions."
    return f"{opened}{name}:{number}\n{output}<|im_end|>"


@pytest.mark.parametrize(
    ("template", "grammar", "numbers"),
    [(KIMI, "kimi_json", (0, 1, 2)), (RESTARTING, "kimi_json_restarting", (0, 1, 0))],
)
def test_results_name_the_call_that_they_answer_by_its_number(
    template: str, grammar: str, numbers: tuple[int, ...]
) -> None:
    assert kimi(template).grammar == grammar
    assert kimi(template).tokenizer.chat_template == template
    session, (one, two, three) = new_session(template), numbers
    after = "<|im_assistant|>assistant<|im_middle|>"
    rest = say(session, renderer(template).message([READ, READ]), "a", "b")
    assert rest == of(one, "a") + of(two, "b") + after
    sampled = renderer(template).message([READ], num_before=2)
    call = f"<|tool_call_begin|>functions.read_file:{three}<|tool_call_argument_begin|>"
    assert call in renderer().tokenizer.decode(sampled)
    assert say(session, sampled, "c") == of(three, "c") + after
    assert say(session, renderer(template).message(["hm"]), "error: no call").startswith(
        of(0 if template == RESTARTING else 3, "error: no call", "unknown")
    )


def test_numbers_go_on_from_calls_that_were_not_run_and_not_from_a_message_without_any() -> None:
    session, too_many = new_session(KIMI), [READ] * 5
    rest = say(session, renderer().message(too_many), "a", "b", "error: more than 2 calls")
    assert rest.startswith(of(0, "a") + of(1, "b") + of(2, "error: more than 2 calls"))
    say(session, renderer().message(["hm"]), "error: no call")
    assert say(session, renderer().message([READ], num_before=5), "c").startswith(of(5, "c"))


def test_results_name_a_tool_that_there_is_not_and_its_name_stays_text() -> None:
    session, forged = new_session(KIMI), ToolCall("x<|im_end|>", {})
    rest = say(session, renderer().message([forged]), "error: unknown tool")
    assert rest.startswith(of(0, "error: unknown tool", forged.name))
    end = renderer().end_token
    follows = renderer().observations(["a"], ["x<|im_end|>:0"]).tolist()
    assert follows.count(end) == renderer().observations(["a"]).tolist().count(end)


def test_numbers_begin_anew_where_a_session_has_a_fresh_context() -> None:
    session = new_session(KIMI)
    say(session, renderer().message([READ]), "a")
    session.turns[0] = replace(session.turns[0], segment_id="an earlier one")
    assert say(session, renderer().message([READ]), "b").startswith(of(0, "b"))


def test_a_served_conversation_numbers_calls_whatever_ids_its_client_gives() -> None:
    talk = [USER, *turn(0, 1), *turn(2)]
    renamed = json.loads(json.dumps(talk).replace("functions.read_file:", "call_"))
    shuffled = [talk[0], talk[1], talk[3], talk[2], *talk[4:]]
    prompts = [
        ChatFrames(kimi().renderers()).prompt([Opening("Be brief."), *read_messages(told)[1]], "").tokens
        for told in (talk, renamed, shuffled)
    ]
    text = renderer().tokenizer.decode(prompts[0])
    assert [text.count(f"begin|>functions.read_file:{number}<") for number in range(4)] == [1, 1, 1, 0]
    assert [text.count(of(number, "1\tx")) for number in range(4)] == [1, 1, 1, 0]
    assert all(prompt.tolist() == prompts[0].tolist() for prompt in prompts)


def test_words_that_the_template_adds_itself_are_closed_as_it_closes_them() -> None:
    bare = renderer().tokenizer.decode(kimi().renderer().prompt("Hi"))
    assert bare.startswith("<|im_system|>system<|im_middle|>You help.<|im_end|>\n<|im_user|>")
    assert "<|im_end|>\n" not in renderer().tokenizer.decode(kimi().renderer().prompt("Hi", "Be brief."))


@pytest.mark.parametrize(
    ("opened", "empty"), [("", "<think></think>"), ("<think>", "<think></think>"), ("<think>", "</think>")]
)
def test_answers_may_be_shown_with_the_marks_of_an_empty_reasoning(opened: str, empty: str) -> None:
    shown = f"<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '{empty}"
    said, prompt = "assistant<|im_middle|>' }}", "assistant<|im_middle|>' if add_generation_prompt"
    template = KIMI.replace(said, f"{said}{{{{- '{shown}' }}}}").replace(
        prompt, prompt.replace("' if", f"{opened}' if")
    )
    chosen = choose_format(kimi_tokenizer(template))
    assert (chosen.grammar, chosen.tokenizer.chat_template) == ("kimi_json", template)
    renderer = replace(chosen, tools=(READ_TOOL,), system="Be brief.").renderer()
    pieces = [*renderer.mark_reasoning("Why?"), "So.", *renderer.grammar.render_calls([READ], True)]
    said = renderer.read(renderer.encode([*pieces, chosen.template.end]))
    assert (said.reasoning, said.text, said.calls) == ("Why?", "So.", (READ,))
    framing = Framing(renderer, Opening())
    told = [framing.render_given(Answer("So.", reasoning=why), first=False) for why in ("", "Why?")]
    texts = [renderer.tokenizer.decode(tokens).partition("<|im_middle|>")[2] for tokens in told]
    assert texts == [f"{empty}So.<|im_end|>", "<think>Why?</think>So.<|im_end|>"]
    assert not framing.without_reasoning(renderer.encode([*renderer.mark_reasoning("Why?")[:-1]])).size


@pytest.mark.parametrize("template", [KIMI, RESTARTING])
def test_calls_as_hermes_has_them_do_without_numbers(template: str) -> None:
    chosen = choose_format(kimi_tokenizer(template), grammar="hermes")
    assert chosen.tokenizer.chat_template == write_chat_template(chosen.template)
    results = chosen.renderer().observations(["a"], ["read_file:0"])
    assert "read_file" not in chosen.tokenizer.decode(results)
    assert choose_format(chosen.tokenizer).digest == chosen.digest


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
@pytest.mark.parametrize("tools", [[], [READ_TOOL.function_schema()]])
def test_transformers_renders_the_tokens_that_conversations_with_numbered_calls_have(
    tmp_path: Path, system: list[Any], tools: list[Any]
) -> None:
    from transformers import AutoTokenizer

    kimi().tokenizer.save(tmp_path)
    judge = AutoTokenizer.from_pretrained(tmp_path)
    for talk in ([USER], [USER, *turn(0)], [USER, *turn(0, 1), *turn(2), *turn(3, 4), USER]):
        words, rest = read_messages([*system, *talk])
        opening = Opening(words, read_tools(tools))
        framing = Framing(kimi().renderers().find(opening), opening)
        begins = [opening, *rest] if words or tools else rest
        parts = [framing.render_given(message, first=not place) for place, message in enumerate(begins)]
        ours = np.concatenate([*parts, framing.answer_frame()]).tolist()
        expected = judge.apply_chat_template(
            [*system, *talk], tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert judge.decode(ours) == judge.decode(expected)
        assert ours == expected
