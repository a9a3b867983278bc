"""A chat endpoint as a sampler: requests, processing of its answers, and failures."""

import asyncio
import json

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agent.agent_builders import FILES, contents

from etude.agent import (
    AgentSession,
    LocalWorkspace,
    RetryPolicy,
    SessionLimits,
    ToolContext,
    core_registry,
    endpoint_stream,
    run_session,
)
from etude.agent.endpoint import Endpoint, EndpointSampler, endpoint_renderer
from etude.agent.endpoint_messages import Answer, CallAnswer, answer_tokens, chat_messages
from etude.agent.endpoint_stream import read_stream
from etude.agent.events import Retried
from etude.errors import ConfigError, SamplerError
from etude.records import SampleRequest, SamplingParams, Status, ToolCall, TrajectoryId
from etude.sandbox.template import Template
from etude.serving.client import NoAnswerError
from etude.tokens.chat.errors import ContextLengthError
from etude_quickstart.memory_backend import MemoryBackend

REGISTRY = core_registry()
LIMITS = SessionLimits(max_turns=20, max_calls_per_turn=8, max_tokens=60_000, max_message_tokens=8_000)


def event(delta=None, finish=None) -> str:
    return (
        "data: "
        + json.dumps({"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}]})
        + "\n\n"
    )


def call_delta(name, arguments, index=0):
    whole = json.dumps(arguments)
    half = len(whole) // 2
    parts = (whole[:half], whole[half:])
    first = {"index": index, "id": "x", "function": {"name": name, "arguments": parts[0]}}
    return [{"tool_calls": [first]}, {"tool_calls": [{"index": index, "function": {"arguments": parts[1]}}]}]


def answer(*deltas, finish="tool_calls") -> str:
    return "".join(event(delta) for delta in deltas) + event(finish=finish) + "data: [DONE]\n\n"


class Served:
    """A scripted endpoint: answers in their order, each a text, a status with headers, or a stream."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.bodies = []
        self.headers = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        self.headers.append(request.headers)
        given = self.answers.pop(0)
        if isinstance(given, tuple):
            return httpx.Response(given[0], headers=given[1], text=given[2])
        if isinstance(given, str):
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=given)
        return httpx.Response(200, stream=given)


class Dropped(httpx.AsyncByteStream):
    """A stream that ends in the middle of a message."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def __aiter__(self):
        yield self._text.encode()
        raise httpx.RemoteProtocolError("peer closed connection")


def sampler_of(served, native=True, on_event=None, **options):
    endpoint = Endpoint("http://model.test/v1", "m", native_tools=native, **options)
    renderer = endpoint_renderer(REGISTRY.schemas, native)
    transport = httpx.MockTransport(served)
    return EndpointSampler(endpoint, renderer, REGISTRY.schemas, on_event, transport), renderer


def run(served, native=True, retry_policy=None, listener=None, on_event=None, **options):
    async def go():
        sampler, renderer = sampler_of(served, native, on_event, **options)
        params = SamplingParams(max_tokens=LIMITS.max_tokens)
        session = AgentSession(
            "fix it", renderer, TrajectoryId("r", "t", 0, 0, 0), LIMITS, params, "be brief"
        )
        context = ToolContext(await MemoryBackend().create(Template(FILES)), REGISTRY)
        try:
            await run_session(session, sampler, LocalWorkspace(context), "s", (0,), retry_policy, listener)
        finally:
            await sampler.aclose()
        return session, context

    return asyncio.run(go())


READ = call_delta("read_file", {"path": "lib/tally.py"})
FINISH = answer(*call_delta("finish", {}), finish="stop")


def test_a_session_runs_through_native_tool_calls() -> None:
    edit = call_delta("edit_lines", {"path": "lib/tally.py", "start": 2, "text": "    total = 0"})
    served = Served(answer({"content": "I read. "}, *READ), answer(*edit), FINISH)
    session, _ = run(served)
    assert session.status is Status.DONE
    # `start` is no string in this tool's schema: the grammar says so, and the agent sees it.
    assert session.turns[0].calls == (ToolCall("read_file", {"path": "lib/tally.py"}),)
    first, second, third = served.bodies
    assert [one["role"] for one in first["messages"]] == ["system", "user"]
    assert first["tools"][2]["function"]["name"] == "read_file"
    assert first["stream"] is True
    said, result = second["messages"][2:]
    assert said["content"] == "I read. "
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"path": "lib/tally.py"}
    assert result["role"] == "tool"
    assert result["tool_call_id"] == said["tool_calls"][0]["id"]
    assert "total = 1" in result["content"]
    assert len(third["messages"]) == 6
    assert not np.any(session.recording.logprobs)
    assert session.recording.version_spans[0].version.lineage == "endpoint:m"


def test_a_session_runs_through_calls_written_as_text() -> None:
    words = "<think>hm</think>Look. <read_file><path>lib/tally.py</path></read_file>"
    served = Served(
        answer({"content": words}, finish="stop"), answer({"content": "<finish></finish>"}, finish="stop")
    )
    session, _ = run(served, native=False)
    assert session.status is Status.DONE
    assert "tools" not in served.bodies[0]
    said, result = served.bodies[1]["messages"][2:]
    assert said["content"] == "Look. <read_file><path>lib/tally.py</path></read_file>"
    assert result["role"] == "user"
    assert "total = 1" in result["content"]


def test_what_comes_early_is_told_and_reasoning_is_kept_to_ourselves() -> None:
    told = []
    served = Served(answer({"reasoning_content": "hm"}, {"content": "Hi"}, *READ), FINISH)
    session, _ = run(served, on_event=told.append)
    assert [getattr(one, "text", getattr(one, "name", "")) for one in told[:3]] == ["hm", "Hi", "read_file"]
    parsed = session.renderer.read(session.recording.tokens[session.turns[0].start : session.turns[0].end])
    assert (parsed.reasoning, parsed.text) == ("hm", "Hi")
    assert "hm" not in json.dumps(served.bodies[1]["messages"])


def test_a_stream_that_drops_in_mid_message_is_asked_for_again_and_leaves_nothing() -> None:
    retried = []
    dropped = Dropped(event({"content": "Half a sen"}))
    cut = event({"content": "no end"})
    served = Served(dropped, cut, "data: {broken\n\n", answer(*READ), FINISH)
    session, _ = run(
        served,
        retry_policy=RetryPolicy(sampler_attempts=4, backoff_s=0.0),
        listener=lambda one: retried.append(one) if isinstance(one, Retried) else None,
    )
    assert session.status is Status.DONE
    assert len(retried) == 3
    assert "Half" not in session.renderer.tokenizer.decode(session.recording.tokens)
    assert served.bodies[0]["messages"] == served.bodies[3]["messages"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_endpoint_is_asked_again_after_as_long_as_it_says(status: int) -> None:
    served = Served((status, {"retry-after": "0.2"}, "busy"), answer(*READ), FINISH)

    async def timed():
        return asyncio.get_running_loop().time()

    began = asyncio.run(timed())
    session, _ = run(served, retry_policy=RetryPolicy(sampler_attempts=2, backoff_s=0.0))
    assert session.status is Status.DONE
    assert asyncio.run(timed()) - began >= 0.2


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_trying_again_cannot_mend_is_the_users(status: int) -> None:
    served = Served((status, {}, "no"))
    with pytest.raises(ConfigError) as caught:
        run(served, retry_policy=RetryPolicy(sampler_attempts=5, backoff_s=0.0))
    assert str(status) in str(caught.value.received)
    assert caught.value.fix


def test_a_full_context_is_called_so() -> None:
    error = ContextLengthError(5000, 4096)
    body = json.dumps({"error": {"message": error.message, "code": "context_length_exceeded"}})
    with pytest.raises(ConfigError, match="filled the model's context") as caught:
        run(Served((400, {}, body)))
    assert "--context-tokens" in (caught.value.fix or "")


@pytest.mark.parametrize(
    "stream",
    [
        "data: [1]\n\n",
        'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
        'data: {"choices": 5}\n\n',
        'data: {"choices": [{"delta": {"tool_calls": [{"index": -1}]}}]}\n\n',
        'data: {"choices": [{"delta": {"tool_calls": [{"index": 100000000}]}}]}\n\n',
        'data: {"error": {"message": "out of memory"}}\n\n',
        "",
        "<html>",
    ],
)
def test_a_malformed_stream_is_a_failure_of_the_sampler(stream: str) -> None:
    with pytest.raises(SamplerError) as raised:
        run(Served(stream))
    assert raised.value.fix


def test_an_answer_that_ran_out_of_tokens_is_cut() -> None:
    session, _ = run(Served(answer({"content": "and so on"}, finish="length")))
    assert (session.status, session.cause) == (Status.LIMIT, "message")


def test_an_endpoint_that_does_not_stream_is_read_whole() -> None:
    message = {
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "finish", "arguments": "{}"}}],
    }
    body = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    session, _ = run(Served((200, {"content-type": "application/json"}, body)))
    assert session.status is Status.DONE


def test_calls_that_do_not_parse_are_told_and_sent_back_as_json() -> None:
    wrong = [{"tool_calls": [{"index": 0, "function": {"name": "read_file", "arguments": '{"path": '}}]}]
    unknown = call_delta("fly", {})
    served = Served(
        answer(*wrong), answer(*unknown), answer({"content": "words only"}, finish="stop"), FINISH
    )
    session, _ = run(served)
    assert [turn.calls[0].error for turn in session.turns[:3]] == [
        "unexpected } in the JSON",
        "unknown tool fly",
        "no call",
    ]
    for message in served.bodies[-1]["messages"]:
        for call in message.get("tool_calls", ()):
            json.loads(call["function"]["arguments"])
    assert served.bodies[-1]["messages"][-1]["role"] == "user"


def test_the_key_comes_from_the_variable_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(ConfigError, match="not set"):
        run(Served(FINISH), key_variable="A_KEY")
    monkeypatch.setenv("A_KEY", "secret")
    served = Served(FINISH)
    run(served, key_variable="A_KEY")
    assert served.headers[0]["authorization"] == "Bearer secret"


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a server address"):
        Endpoint("localhost:80", "m")
    with pytest.raises(ConfigError, match="missing"):
        Endpoint("http://localhost:80", "")


def test_an_aborted_request_ends_with_abort() -> None:
    asked = asyncio.Event()

    class Silent(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield event({"content": "a"}).encode()
            asked.set()
            await asyncio.sleep(60)

    async def go():
        sampler, renderer = sampler_of(Served(Silent()))
        session = AgentSession("x", renderer, TrajectoryId("r", "t", 0, 0, 0), LIMITS)
        action = session.next_action()
        request = SampleRequest("r0", "s", action.tokens, action.params, action.stop_tokens, (0,))

        async def abort():
            await asked.wait()
            sampler.abort("r0")

        aborting = asyncio.create_task(abort())
        chunks = [chunk async for chunk in sampler.stream(request)]
        await aborting
        await sampler.aclose()
        return chunks

    assert [chunk.finish for chunk in asyncio.run(go())] == ["abort"]


def test_a_connection_that_is_cut_in_mid_token_is_a_failure_of_the_sampler() -> None:
    """Over a real socket."""

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = event({"content": "half a tok"})[:-9].encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n" % (len(body) + 50) + body)
        await writer.drain()
        writer.close()

    async def go() -> None:
        server = await asyncio.start_server(half, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        renderer = endpoint_renderer(REGISTRY.schemas)
        sampler = EndpointSampler(Endpoint(f"http://127.0.0.1:{port}/v1", "m"), renderer, REGISTRY.schemas)
        session = AgentSession("x", renderer, TrajectoryId("r", "t", 0, 0, 0), LIMITS)
        context = ToolContext(await MemoryBackend().create(Template(FILES)), REGISTRY)
        try:
            with pytest.raises(SamplerError, match="connection to the endpoint broke"):
                await run_session(session, sampler, LocalWorkspace(context), "s", (0,))
            assert session.status is None
            assert not session.turns
            assert contents(context) == {path: text.encode() for path, text in FILES.items()}
        finally:
            await sampler.aclose()
            server.close()
            await server.wait_closed()

    asyncio.run(go())


NATIVE = endpoint_renderer(REGISTRY.schemas)


@given(
    st.text(), st.text(), st.lists(st.tuples(st.sampled_from(["read_file", "x", ""]), st.text()), max_size=3)
)
def test_any_answer_becomes_tokens_and_messages_again(text, reasoning, calls) -> None:
    made = Answer(text, reasoning, [CallAnswer(name, arguments) for name, arguments in calls], "stop")
    tokens = np.concatenate([NATIVE.prompt("hello", "system"), answer_tokens(made, NATIVE)])
    messages = chat_messages(tokens, NATIVE)
    assert messages[:2] == [{"role": "system", "content": "system"}, {"role": "user", "content": "hello"}]
    json.dumps(messages)
    if calls:
        assert (messages[2]["content"] or "") == text.encode("utf-8", "replace").decode()
        assert len(messages[2]["tool_calls"]) == len(calls)
        for call in messages[2]["tool_calls"]:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_answer_that_says_nothing_is_not_sent_as_an_empty_message(text: str) -> None:
    silent, again = answer_tokens(Answer(text, finish="stop"), NATIVE), NATIVE.user_message("go on")
    messages = chat_messages(np.concatenate([NATIVE.prompt("hello"), silent, again]), NATIVE)
    assert [(one["role"], one["content"]) for one in messages] == [
        ("user", "hello"), ("assistant", "(no answer)"), ("user", "go on")
    ]  # fmt: skip


def test_lines_are_cut_at_newlines_alone_wherever_the_chunks_are() -> None:
    words = "a\u2028b\x0cc\u0085é\U0001f600"
    event_text = json.dumps({"choices": [{"delta": {"content": words}}]}, ensure_ascii=False)
    body = f": comment\r\nevent: x\r\ndata: {event_text}\r\n\r\ndata: [DONE]".encode()

    async def one_by_one():
        for byte in body:
            yield bytes([byte])

    told = []
    read = asyncio.run(read_stream(one_by_one(), told.append))
    assert (read.text, read.finish) == (words, "stop")
    assert [one.text for one in told] == [words]


def test_an_answer_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_stream, "MAX_ANSWER_BYTES", 1000)

    async def endless():
        while True:
            yield b"x" * 100

    with pytest.raises(NoAnswerError, match="too long"):
        asyncio.run(read_stream(endless(), lambda event: None))
