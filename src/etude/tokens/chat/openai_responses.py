"""OpenAI's responses API: reads requests, writes answers. Stateless: each request carries its history.

Each block of an answer is an item: `reasoning`, `message`, `function_call` or `custom_tool_call`. In a
history, consecutive items of these types are one answer.

Codex offers more than functions. Functions of a namespace are announced as `NAMESPACE__NAME`, a custom tool
as a function with one text, `input`; tools that only OpenAI's servers run are not announced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from etude.tokens.chat.answers import AnswerWriter, Block, Choice, Document, Ended
from etude.tokens.chat.client_tools import MAX_TOOLS, ClientTool, client_tool
from etude.tokens.chat.fields import flag, integer, objects, read_text, text, unsupported, wrong
from etude.tokens.chat.messages import Answer, Call, Conversation, Message, Opening
from etude.tokens.chat.openai_chat import read_arguments
from etude.tokens.chat.reader import Part, ReadingRules
from etude.tokens.chat.requests import (
    DRAWING_FIELDS,
    ChatRequest,
    Neutral,
    calls_wanted,
    check_fields,
    check_options,
    read_sampling,
    read_stream,
)

_FIELDS = DRAWING_FIELDS | {
    "input",
    "include",
    "instructions",
    "max_output_tokens",
    "reasoning",
    "stream_options",
    "text",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
_NEUTRAL: Neutral = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled", "auto"),  # one that would have to be cut is refused as too long
    "max_tool_calls": (),
    "top_logprobs": (0,),
}
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "computer_use", "mcp")
"""Prefixes of the types of tools that OpenAI's servers run."""
_INCLUDED = (*_HOSTED, "computer_call", "reasoning.", "message.input_image")
"""Prefixes of parts that `include` may name without effect, since no answer here has them."""
_SYSTEM_JOINT = "\n\n"
_CALLS = ("function_call", "custom_tool_call")
_UNSEEN = ("input_image", "input_file")
_WORDS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def read_response(body: Mapping[str, Any], agent: str = "", strict: bool = True) -> ChatRequest:
    """Reads a request. `agent`: the name that the client gave its agent. Raises BadRequestError."""
    check_fields(body, _FIELDS, _NEUTRAL, strict)
    check_options(body, "text", ("format",), strict)
    check_options(body, "reasoning", (), strict)
    _check_included(body.get("include") or [], strict)
    offered = tuple(_offered_tools(body, strict))
    if len(offered) > MAX_TOOLS:
        raise wrong("tools", len(offered), f"at most {MAX_TOOLS} tools")
    tools = tuple(tool.announced() for tool in offered)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
    system, messages = _read_items(items)
    if body.get("instructions") is not None:
        system.insert(0, text(body["instructions"], "instructions"))
    if not messages:
        raise wrong("input", "no user message", "a text, or items with at least one user message")
    rules = ReadingRules(
        single_call=not flag(body, "parallel_tool_calls", True),
        calls=calls_wanted(body.get("tool_choice"), bool(tools), strict),
        whole_calls=any(tool.is_custom for tool in offered),
    )
    return ChatRequest(
        messages=(Opening(_SYSTEM_JOINT.join(system), tools, agent), *messages),
        rules=rules,
        sampling=read_sampling(body, integer(body, "max_output_tokens", 1)),
        stream=read_stream(body, strict)[0],
        body=body,
    )


def _check_included(included: object, strict: bool) -> None:
    """Raises BadRequestError for log-probabilities, and with `strict` for unknown parts."""
    for place, part in enumerate(included if isinstance(included, list) else [included]):
        if str(part).endswith(".logprobs") or (strict and not str(part).startswith(_INCLUDED)):
            raise unsupported(f"include[{place}]", part, "is not supported here")


@dataclass(frozen=True, slots=True)
class _OfferedTool:
    """A tool as the client offers it."""

    entry: Mapping[str, Any]
    field: str
    namespace: str = ""

    @property
    def is_custom(self) -> bool:
        """Whether it takes one text instead of arguments."""
        return self.entry.get("type") == "custom"

    @property
    def name(self) -> str:
        """Its name as the model sees it."""
        return _joined(self.namespace, str(self.entry.get("name") or ""))

    def announced(self) -> ClientTool:
        """The tool as the model sees it. Raises BadRequestError."""
        text(self.entry.get("name"), f"{self.field}.name")
        words, schema = self.entry.get("description"), self.entry.get("parameters")
        if self.is_custom:
            words, schema = "\n".join([str(words or ""), *self._format()]), _CUSTOM_SCHEMA
        return client_tool(self.name, words, schema, self.field)

    def _format(self) -> list[str]:
        form = self.entry.get("format")
        definition = form.get("definition") if isinstance(form, dict) else None
        return [f"The input has this grammar:\n{definition}"] if isinstance(definition, str) else []


_CUSTOM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _joined(namespace: object, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _offered_tools(body: Mapping[str, Any], strict: bool) -> Iterator[_OfferedTool]:
    """The tools of a request that its client runs. Raises BadRequestError for tools of an unknown type, if
    `strict`."""
    for place, entry in enumerate(objects(body.get("tools") or [], "tools")):
        kind, field = entry.get("type"), f"tools[{place}]"
        if kind == "namespace":
            name = text(entry.get("name"), f"{field}.name")
            for inner, tool in enumerate(objects(entry.get("tools") or [], f"{field}.tools")):
                yield _OfferedTool(tool, f"{field}.tools[{inner}]", name)
        elif kind in ("function", "custom"):
            yield _OfferedTool(entry, field)
        elif strict and not str(kind).startswith(_HOSTED):
            raise unsupported(
                f"{field}.type", kind, "only functions, custom tools and namespaces are supported"
            )


def _read_items(items: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Message]]:
    """The system messages at the start, and the messages that follow."""
    talk = Conversation()
    for place, item in enumerate(items):
        kind, role, field = item.get("type", "message"), item.get("role"), f"input[{place}]"
        if kind in ("function_call_output", "custom_tool_call_output"):
            output = read_text(item.get("output"), f"{field}.output", "\n", _WORDS, _UNSEEN)
            talk.add_result(text(item.get("call_id"), f"{field}.call_id"), output)
        elif kind in ("function_call", "custom_tool_call", "reasoning") or (
            kind == "message" and role == "assistant"
        ):
            talk.add_answer(_part_of_answer(item, kind, field), continues=True)
        elif kind != "message":
            raise unsupported(f"{field}.type", kind, "this item is not supported")
        elif role not in ("user", "system", "developer"):
            raise wrong(f"{field}.role", role, "user, assistant, system or developer")
        else:
            content = read_text(item.get("content"), f"{field}.content", "\n", _WORDS)
            talk.add_message(content, role == "user")
    return talk.system, talk.messages()


def _part_of_answer(item: Mapping[str, Any], kind: str, field: str) -> Answer:
    if kind in _CALLS:
        name = _joined(item.get("namespace"), text(item.get("name"), f"{field}.name"))
        is_custom = kind == "custom_tool_call"
        arguments = {"input": item.get("input")} if is_custom else read_arguments(item.get("arguments"))
        return Answer(calls=(Call(str(item.get("call_id") or ""), name, arguments),))
    if kind == "reasoning":
        content = item.get("content") or item.get("summary") or []
        return Answer(reasoning=read_text(content, f"{field}.content", "", _WORDS))
    return Answer(read_text(item.get("content"), f"{field}.content", "", _WORDS))


# ---- answers ------------------------------------------------------------------------------------


class ResponseWriter(AnswerWriter):
    """Writes the answer to one request."""

    id_prefix = "resp_"
    _num_events = 0

    def begin(self) -> list[Document]:
        begun = [("response.created", {"response": self.whole()})]
        return self._numbered(*begun, ("response.in_progress", {"response": self.whole()}))

    def whole(self) -> Document:
        (choice,) = self.choices
        body, ended, rules = self.request.body, choice.ended, self.request.rules
        is_cut = ended is not None and ended.ending == "length"
        params = self.request.sampling.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "model": self.model,
            "status": "in_progress" if ended is None else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "output": [self._item(choice, index) for index in range(len(choice.blocks))],
            "usage": None if ended is None else self._usage(),
            "instructions": body.get("instructions"),
            "max_output_tokens": self.request.sampling.max_tokens,
            "metadata": metadata if isinstance(metadata := body.get("metadata"), dict) else {},
            "parallel_tool_calls": not rules.single_call,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [
                tool | ({"strict": False} if tool.get("type") == "function" else {})
                for tool in body.get("tools") or []
            ],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def _usage(self) -> Document:
        return {**self.usage("input", "output"), "output_tokens_details": {"reasoning_tokens": 0}}

    def _numbered(self, *events: tuple[str, Document]) -> list[Document]:
        documents = [
            {"type": kind, "sequence_number": self._num_events + place, **document}
            for place, (kind, document) in enumerate(events)
        ]
        self._num_events += len(events)
        return documents

    def _item(self, choice: Choice, index: int, is_done: bool = True) -> Document:
        """The item of a block: with its content if `is_done`, else as it begins."""
        block = choice.blocks[index]
        status = "completed" if is_done else "in_progress"
        if is_done and index == len(choice.blocks) - 1 and choice.ended and choice.ended.ending == "length":
            status = "incomplete"
        head = {"id": f"{_ITEM_IDS[block.kind]}_{self.id.removeprefix(self.id_prefix)}_{index}"}
        if block.kind == "call":
            return self._call_item(block, head, status, is_done)
        content = [_content(block)] if is_done else []
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {**head, "type": "message", "role": "assistant", "content": content, "status": status}

    def _call_item(self, block: Block, head: Document, status: str, is_done: bool) -> Document:
        tool = self._tools.get(block.name)
        head |= {"call_id": block.id, "name": block.name, "status": status}
        if tool is not None and tool.namespace:
            head |= {"name": tool.entry["name"], "namespace": tool.namespace}
        if tool is not None and tool.is_custom:
            head |= {"type": "custom_tool_call", "id": head["id"].replace("fc_", "ctc_", 1)}
            return {**head, "input": _custom_input(block) if is_done else ""}
        return {**head, "type": "function_call", "arguments": block.text if is_done else ""}

    @cached_property
    def _tools(self) -> dict[str, _OfferedTool]:
        return {tool.name: tool for tool in _offered_tools(self.request.body, strict=False)}

    def _write(self, choice: Choice, part: Part, begins: bool, rows: list[Document]) -> list[Document]:
        index, block = len(choice.blocks) - 1, choice.blocks[-1]
        item = self._item(choice, index, is_done=False)
        where: Document = {"item_id": item["id"], "output_index": index}
        documents: list[Document] = []
        if begins:
            documents += self._close(choice, index - 1)
            documents += self._numbered(("response.output_item.added", {"output_index": index, "item": item}))
            if block.kind == "text":
                empty = {**where, "content_index": 0, "part": _content(Block("text"))}
                documents += self._numbered(("response.content_part.added", empty))
        added = getattr(part, "text", "")
        if added and item["type"] != "custom_tool_call":
            place = {} if block.kind == "call" else {"content_index": 0}
            more = {"logprobs": []} if block.kind == "text" else {}
            documents += self._numbered(
                (f"response.{_DELTAS[block.kind]}.delta", {**where, **place, **more, "delta": added})
            )
        return documents

    def _close(self, choice: Choice, index: int) -> list[Document]:
        """The events that end an item."""
        if index < 0:
            return []
        block, item = choice.blocks[index], self._item(choice, index)
        where: Document = {"item_id": item["id"], "output_index": index}
        done = f"response.{_DELTAS[block.kind]}.done"
        events: list[tuple[str, Document]] = []
        if item["type"] == "custom_tool_call":
            value = item["input"]
            events.append(("response.custom_tool_call_input.delta", {**where, "delta": value}))
            events.append(("response.custom_tool_call_input.done", {**where, "input": value}))
        elif block.kind == "call":
            events.append((done, {**where, "name": item["name"], "arguments": block.text}))
        elif block.kind == "reasoning":
            events.append((done, {**where, "content_index": 0, "text": block.text}))
        else:
            events.append((done, {**where, "content_index": 0, "text": block.text, "logprobs": []}))
            part = {**where, "content_index": 0, "part": _content(block)}
            events.append(("response.content_part.done", part))
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
        return self._numbered(*events)

    def _finish(self, choice: Choice, ended: Ended) -> list[Document]:
        closed = self._close(choice, len(choice.blocks) - 1)
        document = self.whole()
        return closed + self._numbered((f"response.{document['status']}", {"response": document}))


_ITEM_IDS = {"text": "msg", "reasoning": "rs", "call": "fc"}
_DELTAS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def _custom_input(block: Block) -> str:
    """The input of a complete call of a custom tool."""
    arguments = json.loads(block.text or "{}")
    return str(arguments.get("input", ""))


def _content(block: Block) -> Document:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
