"""Requests and requirements of coding agents: Claude Code 2.1.197, Codex 0.171, pi 0.73.1, Cline 3.0.65."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.environment.recording.recording_builders import qwen_tokenizer

from etude.records import ToolCall
from etude.tokens.chat.answers import Ended, Sampled
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.chat.dialects import DIALECTS, MESSAGES, RESPONSES
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.messages import Answer, Call, Opening, Results, SystemWords, UserWords, content_key
from etude.tokens.chat.reader import CallDelta, CallHead
from etude.tokens.grammar import ReasoningDelta, TextDelta

SHELL = {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}}}
AGENTS = {"type": "namespace", "name": "agents", "tools": [{**SHELL, "name": "close"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin end"},
}
SEARCH = {"type": "web_search", "external_web_access": True}
CODEX: dict[str, Any] = {
    "input": "Fix it.",
    "tools": [SHELL, AGENTS, PATCH, SEARCH],
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
    "store": False,
}
CLAUDE: dict[str, Any] = {
    "max_tokens": 64000,
    "system": [{"type": "text", "text": "You are an agent."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
        {"role": "system", "content": "There are two kinds of agents."},
    ],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
}


def test_claude_codes_system_words_among_the_messages_stay_in_their_place() -> None:
    request = MESSAGES.read(CLAUDE)
    said = (UserWords("Fix it."), SystemWords("There are two kinds of agents."))
    assert request.messages == (Opening("You are an agent."), *said)


def test_system_words_before_all_messages_are_the_openings() -> None:
    first, second = CLAUDE["messages"]
    request = MESSAGES.read({**CLAUDE, "messages": [second, first]})
    assert request.messages[0] == Opening("You are an agent.\n\nThere are two kinds of agents.")


@pytest.mark.parametrize("strict", [True, False])
def test_codex_tools_are_announced_but_for_those_of_openais_servers(strict: bool) -> None:
    opening = RESPONSES.read(CODEX, "", strict).messages[0]
    assert isinstance(opening, Opening)
    assert [tool.name for tool in opening.tools] == ["exec_command", "agents__close", "apply_patch"]
    assert opening.tools[2].description == "Edit files.\nThe input has this grammar:\nstart: begin end"
    assert [one.name for one in opening.tools[2].parameters] == ["input"]


def test_a_tool_of_an_unknown_type_is_refused_by_serve_and_passed_over_for_agents() -> None:
    body = {**CODEX, "tools": [SHELL, {"type": "other"}]}
    with pytest.raises(BadRequestError) as caught:
        RESPONSES.read(body)
    assert caught.value.field == "tools[1].type"
    with pytest.raises(BadRequestError) as caught:
        RESPONSES.read({**CODEX, "tools": [{**AGENTS, "tools": [{"type": "function"}]}]})
    assert caught.value.field == "tools[0].tools[0].name"
    opening = RESPONSES.read(body, "", strict=False).messages[0]
    assert isinstance(opening, Opening) and len(opening.tools) == 1


def test_codex_gets_calls_in_its_own_form_and_tells_them_so() -> None:
    request = RESPONSES.read(CODEX)
    writer = RESPONSES.writer(request, "a", 1, qwen_tokenizer(), "m")
    parts = [
        CallHead("call_1", "agents__close"),
        CallDelta('{"target": "x"}'),
        CallHead("call_2", "apply_patch"),
        CallDelta('{"input": "begin\\nend"}'),
    ]
    events = [*writer.add_event(Sampled(parts, None)), *writer.add_event(Ended("calls", 4))]
    closed, patch = writer.whole()["output"]
    assert (closed["type"], closed["namespace"], closed["name"]) == ("function_call", "agents", "close")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "begin\nend")
    changes = [one for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    assert [one["delta"] for one in changes] == ["begin\nend"]
    assert [one["item"] for one in events if one["type"] == "response.output_item.done"] == [closed, patch]

    results = [
        {"type": "function_call_output", "call_id": "call_1", "output": "closed"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "patched"},
    ]
    again = RESPONSES.read({**CODEX, "input": [{"role": "user", "content": "Fix."}, closed, patch, *results]})
    calls = (
        Call("call_1", "agents__close", {"target": "x"}),
        Call("call_2", "apply_patch", {"input": "begin\nend"}),
    )
    assert again.messages[2:] == (Answer("", calls), Results(("closed", "patched")))


def test_an_argument_that_has_its_default_may_be_left_out_of_a_call_and_another_value_may_not() -> None:
    properties = {"path": {"type": "string"}, "replace_all": {"type": "boolean", "default": False}}
    tool = {"name": "Edit", "input_schema": {"type": "object", "properties": properties}}
    opening = MESSAGES.read({**CLAUDE, "tools": [tool]}).messages[0]
    assert isinstance(opening, Opening)

    def key(name: str, **arguments: Any) -> bytes:
        return content_key(Answer("", (Call("1", name, arguments),)), opening.tools)

    assert key("Edit", path="a") == key("Edit", replace_all=False, path="a")
    assert key("Edit", path="a") != key("Edit", path="a", replace_all=True)
    assert key("Edit", path="a") != key("Edit", path="a", replace_all=0)
    assert key("Other", path="a") != key("Other", path="a", replace_all=False)


def test_a_number_is_served_as_the_model_wrote_it() -> None:
    properties = {name: {"type": "number"} for name in "abc"}
    body = {**CODEX, "tools": [{**SHELL, "parameters": {"type": "object", "properties": properties}}]}
    opening = RESPONSES.read(body).messages[0]
    assert isinstance(opening, Opening)
    found = call_arguments(ToolCall("exec_command", {"a": "1000", "b": "0.5", "c": "1e3"}), opening.tools)
    assert json.dumps(found) == '{"a": 1000, "b": 0.5, "c": 1000.0}'


@pytest.mark.parametrize("dialect", ["messages", "responses", "chat_completions"])
def test_an_image_that_a_tool_returns_is_named_to_the_model_and_one_of_the_users_is_refused(
    dialect: str,
) -> None:
    text, image = {"type": "text", "text": "a.png"}, {"type": "image"}
    call = {"id": "c", "type": "tool_use", "name": "f", "input": {}}
    said: list[Any] = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]}]
    result: dict[str, Any] = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}
    result["content"][0]["content"] = [text, image]
    user: dict[str, Any] = {"role": "user", "content": [text, image]}
    name, rest = "messages", dict(CLAUDE)
    if dialect == "responses":
        image = {"type": "input_image", "image_url": "data:"}
        said[1] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": [text, image]}
        name, rest = "input", dict(CODEX)
    elif dialect == "chat_completions":
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        said[1]["content"], function = None, {"name": "f", "arguments": "{}"}
        said[1]["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
        result = {"role": "tool", "tool_call_id": "c", "content": [text, image]}
        rest = {}
    user["content"] = [text, image]
    read = next(one.read for one in DIALECTS if one.name == dialect)
    seen = read({**rest, name: [*said, result]}).messages[-1]
    note = f"[{image['type']}: not shown, only text can be sent to this model]"
    assert seen == Results((f"a.png\n{note}",))
    with pytest.raises(BadRequestError, match="only text"):
        read({**rest, name: [user]})


def test_reasoning_is_signed_so_that_an_agent_sends_it_back_as_reasoning_and_not_as_words() -> None:
    writer = MESSAGES.writer(MESSAGES.read(CLAUDE), "a", 1, qwen_tokenizer(), "m")
    events = writer.add_event(Sampled([ReasoningDelta("I look."), TextDelta("Done.")], None))
    thinking, said = [*writer.add_event(Ended("stop", 2)), writer.whole()][-1]["content"]
    begun = next(one["content_block"] for one in events if one["type"] == "content_block_start")
    assert begun == {"type": "thinking", "thinking": "", "signature": ""}
    signed = [one["delta"] for one in events if one.get("delta", {}).get("type") == "signature_delta"]
    assert [one["signature"] for one in signed] == [thinking["signature"]] and thinking["signature"]
    again = [CLAUDE["messages"][0], {"role": "assistant", "content": [thinking, said]}]
    read = MESSAGES.read({**CLAUDE, "messages": [*again, {"role": "user", "content": "Go on."}]})
    assert read.messages[2] == Answer("Done.", (), "I look.")


@pytest.mark.parametrize("strict", [True, False])
def test_a_thread_is_refused_in_the_words_by_which_anthropics_tool_runner_sends_whole_histories(
    strict: bool,
) -> None:
    with pytest.raises(BadRequestError) as caught:
        MESSAGES.read({**CLAUDE, "thread": {"type": "create"}}, "", strict)
    _, document, _ = MESSAGES.respell(caught.value, (400, {"error": {"message": "m"}}, {}))
    assert document["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_a_response_may_ask_for_parts_that_no_answer_has_and_for_a_history_to_be_cut() -> None:
    parts = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    assert RESPONSES.read({**CODEX, "include": parts, "truncation": "auto"})
    logprobs = "message.output_text.logprobs"
    for strict, part in ((True, "other"), (True, logprobs), (False, logprobs)):
        with pytest.raises(BadRequestError) as caught:
            RESPONSES.read({**CODEX, "include": [*parts, part]}, "", strict)
        assert caught.value.field == "include[2]"
    assert RESPONSES.read({**CODEX, "include": ["other"]}, "", strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_how_much_an_agent_wants_the_model_to_think_is_a_hint(strict: bool) -> None:
    assert MESSAGES.read({**CLAUDE, "thinking": {"type": "enabled", "budget_tokens": 3072}}, "", strict)


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "name": "f"}, {"type": "any"}])
def test_a_forced_call_is_refused_by_serve_and_left_to_the_model_for_agents(choice: Any) -> None:
    function = {"name": "f", "parameters": {}}
    bodies = {
        "chat_completions": {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function}],
        },
        "responses": CODEX,
        "messages": {**CLAUDE, "tools": [{"name": "f", "input_schema": {}}]},
    }
    for dialect in DIALECTS:
        body = {**bodies[dialect.name], "tool_choice": choice}
        with pytest.raises(BadRequestError, match="cannot be forced"):
            dialect.read(body)
        assert dialect.read(body, "", strict=False).rules.calls
