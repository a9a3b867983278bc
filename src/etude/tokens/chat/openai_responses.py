"""OpenAI's responses: requests read, answers written. Nothing is stored: each request tells its history.

Each block of an answer is an item: `reasoning`, `message` or `function_call`. In a history, the items between
what the user says and the results of tools are one answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.tokens.chat.answers import AnswerWriter, Block, Choice, Document, Ended
from etude.tokens.chat.client_tools import ClientTool, client_tool, read_entries
from etude.tokens.chat.fields import flag, integer, objects, text, unsupported, words, wrong
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
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}
_SYSTEM_JOINT = "\n\n"
_WORDS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def read_response(body: Mapping[str, Any], agent: str = "", strict: bool = True) -> ChatRequest:
    """Reads a request. `agent`: the name that the client gave its agent. Raises BadRequestError."""
    check_fields(body, _FIELDS, _NEUTRAL, strict)
    check_options(body, "text", ("format",), strict)
    check_options(body, "reasoning", (), strict)
    tools = read_entries(body.get("tools"), _tool)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
    system, messages = _read_items(items)
    if body.get("instructions") is not None:
        system.insert(0, text(body["instructions"], "instructions"))
    if not messages:
        raise wrong("input", "no user message", "a text, or items with at least one user message")
    rules = ReadingRules(
        single_call=not flag(body, "parallel_tool_calls", True),
        calls=calls_wanted(body.get("tool_choice"), bool(tools)),
    )
    return ChatRequest(
        messages=(Opening(_SYSTEM_JOINT.join(system), tools, agent), *messages),
        rules=rules,
        sampling=read_sampling(body, integer(body, "max_output_tokens", 1)),
        stream=read_stream(body, strict)[0],
        body=body,
    )


def _tool(entry: Mapping[str, Any], field: str) -> ClientTool:
    if entry.get("type") != "function":
        raise unsupported(f"{field}.type", entry.get("type"), "only function tools are supported here")
    return client_tool(entry.get("name"), entry.get("description"), entry.get("parameters"), field)


def _read_items(items: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Message]]:
    """The system's words at the start, and the messages that follow."""
    talk = Conversation()
    for place, item in enumerate(items):
        kind, role, field = item.get("type", "message"), item.get("role"), f"input[{place}]"
        if kind == "function_call_output":
            output = words(item.get("output"), f"{field}.output", "\n", _WORDS)
            talk.add_result(text(item.get("call_id"), f"{field}.call_id"), output)
        elif kind in ("function_call", "reasoning") or (kind == "message" and role == "assistant"):
            talk.add_answer(_part_of_answer(item, kind, field), goes_on=True)
        elif kind != "message":
            raise unsupported(f"{field}.type", kind, "no such item can be sent to this model")
        elif role not in ("user", "system", "developer"):
            raise wrong(f"{field}.role", role, "user, assistant, system or developer")
        else:
            said = words(item.get("content"), f"{field}.content", "\n", _WORDS)
            talk.add_words(said, role == "user")
    return talk.system, talk.messages()


def _part_of_answer(item: Mapping[str, Any], kind: str, field: str) -> Answer:
    if kind == "function_call":
        name, call_id = text(item.get("name"), f"{field}.name"), str(item.get("call_id") or "")
        return Answer(calls=(Call(call_id, name, read_arguments(item.get("arguments"))),))
    if kind == "reasoning":
        said = item.get("content") or item.get("summary") or []
        return Answer(reasoning=words(said, f"{field}.content", "", _WORDS))
    return Answer(words(item.get("content"), f"{field}.content", "", _WORDS))


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
            "tools": [{**tool, "strict": False} for tool in body.get("tools") or []],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def _usage(self) -> Document:
        return {**self.usage.document("input", "output"), "output_tokens_details": {"reasoning_tokens": 0}}

    def _numbered(self, *events: tuple[str, Document]) -> list[Document]:
        documents = [
            {"type": kind, "sequence_number": self._num_events + place, **document}
            for place, (kind, document) in enumerate(events)
        ]
        self._num_events += len(events)
        return documents

    def _item(self, choice: Choice, index: int, is_done: bool = True) -> Document:
        """The item of a block. `is_done`: it is shown with what it holds, else as it begins."""
        block = choice.blocks[index]
        status = "completed" if is_done else "in_progress"
        if is_done and index == len(choice.blocks) - 1 and choice.ended and choice.ended.ending == "length":
            status = "incomplete"
        head = {"id": f"{_ITEM_IDS[block.kind]}_{self.id.removeprefix(self.id_prefix)}_{index}"}
        if block.kind == "call":
            head |= {"type": "function_call", "call_id": block.id, "name": block.name, "status": status}
            return {**head, "arguments": block.text if is_done else ""}
        content = [_content(block)] if is_done else []
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {**head, "type": "message", "role": "assistant", "content": content, "status": status}

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
        if added:
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
        if block.kind == "call":
            events.append((done, {**where, "name": block.name, "arguments": block.text}))
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


def _content(block: Block) -> Document:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
