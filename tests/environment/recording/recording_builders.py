"""A small tokenizer, a sampler with recognisable log-probabilities, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken

from etude.environment.recording import (
    AnswerService,
    Ask,
    Recordings,
    RendererCache,
    SamplingDefaults,
    SessionMap,
)
from etude.environment.recording.branches import Branch
from etude.environment.recording.session_map import MapLimits
from etude.errors import SamplerError
from etude.records import SampleChunk, SampleRequest, Scores
from etude.tokens import QWEN3_TEMPLATE, Renderer, Tokenizer, train_tokenizer
from etude.tokens.chat.answers import Ended
from etude.tokens.chat.dialects import CHAT
from etude.tokens.chat.messages import Answer, Results, UserWords
from etude.tokens.grammar import HermesGrammar, Parameter, ToolSchema
from tests.fakes.scripted import ScriptedSampler

ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TOKEN = "tenant-token"
TEXTS = ["You are a coding agent. Fix lib/tally.py, then run its tests.\nassistant user system tool\n" * 8]

READ = ToolSchema(
    "read_file",
    "Read a file.",
    (Parameter("path", "file"), Parameter("offset", "line", required=False, kind="integer")),
)
OPENAI_TOOLS = [READ.function_schema()]
ANTHROPIC_TOOLS = [{"name": READ.name, "description": READ.description, "input_schema": READ.json_schema()}]


def call_text(path: str, offset: int | None = None) -> str:
    """A call as the model writes it."""
    more = "" if offset is None else f', "offset": {offset}'
    return f'<tool_call>\n{{"name": "read_file", "arguments": {{"path": "{path}"{more}}}}}\n</tool_call>'


@cache
def qwen_tokenizer() -> Tokenizer:
    base = train_tokenizer(TEXTS, 320, ["<|im_start|>", "<|im_end|>"])
    whole = tokenizers.Tokenizer.from_str(base._definition)
    whole.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
    return Tokenizer(whole.to_str())


@cache
def renderers() -> RendererCache:
    return RendererCache(qwen_tokenizer(), HermesGrammar, QWEN3_TEMPLATE)


@cache
def plain_renderer() -> Renderer:
    return Renderer(qwen_tokenizer(), HermesGrammar([READ]), QWEN3_TEMPLATE)


def answer_tokens(text: str, ended: bool = True) -> NDArray[np.int32]:
    """An answer as it is sampled, its tags and marks as tokens."""
    renderer = plain_renderer()
    end = [renderer.template.end] if ended else []
    return renderer.encode([*renderer.grammar.split(text), *end])


@dataclass
class TellingSampler:
    """Plays answers; the logprob of a token names the request and the place, so that none can be mixed up."""

    answers: Callable[[NDArray[np.int32]], str]
    """The context so far -> the next answer's text."""
    chunk_tokens: int = 5
    route_shape: tuple[int, int] | None = (2, 2)
    failures: int = 0
    """Requests to come that fail in mid-answer."""
    refusals: int = 0
    """Requests to come that fail before it."""
    contexts: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    """By request: the whole context."""
    given: dict[str, list[SampleChunk]] = field(default_factory=dict)
    """By request: the chunks that were handed out."""
    inner: ScriptedSampler = field(init=False)
    num_requests: int = 0
    closed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def script(session_id: str, context: NDArray[np.int32]) -> NDArray[np.int32]:
            self.contexts[self.inner.requests[-1].id] = np.array(context)
            return answer_tokens(self.answers(context))

        self.inner = ScriptedSampler(script, route_shape=self.route_shape, chunk_tokens=self.chunk_tokens)

    def open(self, session_id: str, sibling: str | None = None) -> None:
        self.inner.open(session_id, sibling)

    def close(self, session_id: str) -> None:
        self.closed.append(session_id)
        self.inner.close(session_id)

    def abort(self, request_id: str) -> None:
        self.inner.abort(request_id)

    async def score(self, tokens: NDArray[np.int32], version: Any) -> Scores:
        return await self.inner.score(tokens, version)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        if self.refusals:
            self.refusals -= 1
            raise SamplerError("the engine is dead")
        self.num_requests += 1
        number, place = self.num_requests, 0
        chunks = self.given.setdefault(request.id, [])
        async for chunk in self.inner.stream(request):
            count = len(chunk.tokens)
            logprobs = -(number + np.arange(place, place + count) / 4096).astype(np.float32)
            place += count
            told = replace(chunk, logprobs=logprobs)
            chunks.append(told)
            yield told
            if self.failures:
                self.failures -= 1
                self.given.pop(request.id)
                raise SamplerError("the engine died")


def replies(texts: Sequence[str]) -> Callable[[NDArray[np.int32]], str]:
    """The texts, one for each request."""
    remaining = iter(texts)
    return lambda context: next(remaining)


@dataclass
class ChatClient:
    """An OpenAI-style client without HTTP between."""

    service: AnswerService
    tools: list[dict[str, Any]] = field(default_factory=lambda: OPENAI_TOOLS)
    answer_tokens: int = 0
    """Of all answers, as their usage says."""

    async def send(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """Asks for an answer; the whole document."""
        body = {"messages": messages, "tools": self.tools, **options}
        request = CHAT.read(body, options.get("agent", ""), strict=False)
        params, rules = SamplingDefaults().params(request.sampling), replace(request.rules, whole_calls=True)
        num_tokens, events = self.service.start(Ask(request.messages, params, rules, request.sampling.seed))
        writer = CHAT.writer(request, "0", num_tokens, qwen_tokenizer(), "m")
        async for event in events:
            writer.add_event(event)
            assert not isinstance(event, Ended) or event.num_tokens == writer.completion_tokens
        document = writer.whole()
        self.answer_tokens += document["usage"]["completion_tokens"]
        return document


def make_service(
    sampler: TellingSampler, keep_thinking: bool = True, limits: MapLimits | None = None
) -> AnswerService:
    session_map = SessionMap("run/t/e0/g0/0", renderers().find, limits or MapLimits(), keep_thinking)
    return AnswerService(session_map, sampler, answer_s=60, abort_s=60)


def make_recordings(sampler: Any, store: Path, **options: Any) -> Recordings:
    return Recordings(sampler, renderers(), store, {TOKEN: "team", "other-token": "others"}, **options)


def check_recording(service: AnswerService, sampler: TellingSampler) -> None:
    """What must hold always: each sampled token is recorded once, in the context that it was sampled in."""
    for branch in service.session_map.branches:
        check_messages(branch)
    segments = service.session_map.segments()
    by_id = {segment.id: segment for segment in segments}
    recorded: dict[float, tuple[str, int]] = {}
    for segment in segments:
        for place in np.flatnonzero(segment.sampled).tolist():
            logprob = float(segment.logprobs[place])
            assert logprob not in recorded, "a sampled token is trained twice"
            recorded[logprob] = (segment.id, place)
        assert not segment.logprobs[~segment.sampled].any()
        assert all(
            one.end == two.start for one, two in zip(segment.turn_spans, segment.turn_spans[1:], strict=False)
        )
        if segment.parent is not None:
            parent, offset = by_id[segment.parent[0]], segment.parent[1]
            assert 0 <= offset <= len(parent.tokens)
            if segment.relation in ("fork", "rewrite"):
                assert np.array_equal(segment.tokens[:offset], parent.tokens[:offset])
                assert not segment.sampled[:offset].any()
        elif segment.relation != "subagent":
            assert segment.relation == "root"
    expected: set[float] = set()
    for request_id, chunks in sampler.given.items():
        if not chunks:
            continue  # the prefix was missed: another request took its place
        context, place = sampler.contexts[request_id], 0
        segment = by_id.get(request_id.rsplit(":", 1)[0])
        assert float(chunks[0].logprobs[0]) in recorded, "an answer was lost"
        cut = False
        for chunk in chunks:
            for token, logprob in zip(chunk.tokens.tolist(), chunk.logprobs.tolist(), strict=True):
                if logprob not in recorded:
                    cut = True  # after a stop string: not part of the answer
                    continue
                assert not cut, "what is recorded of an answer is its beginning"
                expected.add(logprob)
                assert segment is not None and recorded[logprob] == (segment.id, len(context) + place)
                assert int(segment.tokens[len(context) + place]) == token
                place += 1
        assert segment is not None
        assert np.array_equal(segment.tokens[: len(context)], context), "replayed context"
    assert expected == set(recorded)


def check_messages(branch: Branch) -> None:
    """The tokens of a branch are its messages, one after the other, and nothing else."""
    tokens, decode = branch.recording.tokens, qwen_tokenizer().decode
    position = 0
    for entry in branch.entries[1:]:
        position = position or branch.entries[0].end
        shown = decode(tokens[position : entry.end]).replace("\ufffd", "")
        position = entry.end
        match entry.message:
            case UserWords(text):
                assert shown == f"\n<|im_start|>user\n{text}<|im_end|>"
            case Results(outputs):
                rows = "".join(f"\n<tool_response>\n{output}\n</tool_response>" for output in outputs)
                assert shown == f"\n<|im_start|>user{rows}<|im_end|>"
            case Answer(text, calls):
                assert shown.startswith("\n<|im_start|>assistant\n")
                assert shown.count("<|im_start|>") == 1 and shown.count("<|im_end|>") == entry.closed
                assert all(call.name in shown for call in calls)
                remaining = iter(shown)  # calls stand between what was served as one text
                assert all(character in remaining for character in text if character not in " \n\ufffd")
    assert decode(tokens[position:]) == ("\n<|im_start|>assistant\n" if branch.framed else "")
