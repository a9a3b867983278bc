"""Readers of answers: arbitrary answers in arbitrary chunks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from etude.records import ToolCall
from etude.tokens import QWEN3_TEMPLATE, Renderer
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.framing import Framing
from etude.tokens.chat.messages import Opening
from etude.tokens.chat.openai_chat import read_tools
from etude.tokens.chat.reader import (
    AnswerReader,
    CallDelta,
    CallHead,
    Part,
    ReadingRules,
    TextReader,
)
from etude.tokens.grammar import HermesGrammar, Parameter, TextDelta, ToolSchema
from tests.environment.recording.recording_builders import READ, qwen_tokenizer
from tests.inference.server.serving import xml_model

EDIT = ToolSchema(
    "edit",
    "Edit.",
    (
        Parameter("path", "file"),
        Parameter("lines", "which", kind="array", schema={"items": {"type": "integer"}}),
        Parameter("all", "whether", required=False, kind="boolean"),
        Parameter("text", "new", required=False),
    ),
)


@cache
def hermes() -> Renderer:
    return Renderer(qwen_tokenizer(), HermesGrammar([READ, EDIT]), QWEN3_TEMPLATE)


@cache
def xml() -> Renderer:
    return xml_model()[1]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
EDITS = st.builds(
    lambda path, lines, every, text: ToolCall(
        "edit",
        {"path": path, "lines": json.dumps(lines), "all": "true" if every else "false", "text": text},
    ),
    TEXTS,
    st.lists(st.integers(-99, 99), max_size=3),
    st.booleans(),
    TEXTS,
)
READS = st.builds(lambda path: ToolCall("read_file", {"path": path}), TEXTS)


def cut(tokens: NDArray[np.int32], sizes: Sequence[int]) -> list[NDArray[np.int32]]:
    places = list(itertools.takewhile(lambda place: place < len(tokens), itertools.accumulate(sizes)))
    return np.split(tokens, places)


def read(reader: TextReader, chunks: Sequence[NDArray[np.int32]]) -> list[Part]:
    parts: list[Part] = []
    for chunk in chunks:
        parts += reader.feed(chunk)[0]
        if reader.ended:
            break
    return [*parts, *reader.finish()]


def told_calls(parts: Sequence[Part]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallHead):
            calls.append((part.name, ""))
        elif isinstance(part, CallDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return calls


def new_reader(renderer: Renderer, **rules: Any) -> AnswerReader:
    return AnswerReader(renderer, ReadingRules(**rules))


@given(
    st.lists(READS | EDITS | st.sampled_from(["Some words.", "é "]), max_size=4),
    st.lists(st.integers(1, 9), max_size=40),
)
def test_the_pieces_of_a_call_are_the_json_of_its_arguments(parts: list[Any], sizes: list[int]) -> None:
    tokens = hermes().message(parts)
    reader = new_reader(hermes())
    found = told_calls(read(reader, cut(tokens, sizes)))
    wanted = [(call.name, call_arguments(call, [READ, EDIT])) for call in hermes().parse(tokens)]
    assert [(name, json.loads(text)) for name, text in found] == wanted
    assert [(call.name, call.arguments) for call in reader.answer.calls] == wanted
    assert len(wanted) == sum(isinstance(part, ToolCall) for part in parts)


@given(st.lists(st.integers(0, 330), max_size=60), st.lists(st.integers(1, 9), max_size=40), st.booleans())
def test_no_tokens_break_a_reader_and_no_cut_changes_what_is_served(
    ids: list[int], sizes: list[int], is_xml: bool
) -> None:
    renderer = xml() if is_xml else hermes()
    tokens = np.array([one % renderer.tokenizer.vocab_size for one in ids], dtype=np.int32)
    whole = read(new_reader(renderer, stops=("ab",)), [tokens])
    pieces = read(new_reader(renderer, stops=("ab",)), cut(tokens, sizes))
    assert told_calls(whole) == told_calls(pieces)
    texts = ["".join(p.text for p in parts if isinstance(p, TextDelta)) for parts in (whole, pieces)]
    assert texts[0] == texts[1] and "ab" not in texts[0]


@given(
    st.text("abé🙂 ", max_size=30),
    st.lists(st.text("abé ", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_a_completion_ends_before_its_first_stop_string(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    tokens = qwen_tokenizer().encode(text)
    reader = TextReader(qwen_tokenizer(), stops)
    shown = "".join(part.text for part in read(reader, cut(tokens, sizes)) if isinstance(part, TextDelta))
    ends = [text.find(stop) for stop in stops if stop in text]
    # Where two stop strings are complete with the same token, the one that begins first counts.
    whole = next((n for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops)), None)
    if whole is None:
        assert shown == text and not reader.ended
    else:
        assert reader.ended and text.startswith(shown)
        assert len(shown) in ends or not any(stop in shown for stop in stops)


def test_tags_of_tools_that_are_not_offered_are_text() -> None:
    """The tokenizer holds them as single tokens: nothing of a call may vanish."""
    model, whole = xml_model()
    assert model.renderers is not None
    tokens = whole.message(["I read. ", ToolCall("read_file", {"path": "a.py"})])
    for rules in (ReadingRules(), ReadingRules(calls=False), ReadingRules(whole_calls=True)):
        reader = AnswerReader(model.renderers.find(Opening()), rules)
        parts = [*reader.feed(tokens)[0], *reader.finish()]
        text = "".join(part.text for part in parts if isinstance(part, TextDelta))
        assert text == "I read. <read_file><path>a.py</path></read_file>"
        assert reader.answer.calls == ()


def test_a_model_with_tags_of_its_own_is_offered_the_tools_that_it_knows() -> None:
    model, _ = xml_model()
    assert model.renderers is not None
    known, other = ({"type": "function", "function": {"name": name}} for name in ("look", "fetch"))
    schema = READ.function_schema()
    opening = Opening(tools=read_tools([schema, known, other]))
    renderer = model.renderers.find(opening)
    assert [tool.name for tool in renderer.grammar.tools] == ["read_file"]
    assert not len(Framing(renderer, opening).render_given(opening, first=True)), (
        "it was trained with them, without being told"
    )
    words = Opening("Be brief.", read_tools([schema]))
    assert "read_file" not in model.tokenizer.decode(Framing(renderer, words).render_given(words, first=True))


def test_a_tool_is_offered_without_the_parameters_that_a_model_has_no_tags_for() -> None:
    model, _ = xml_model()
    assert model.renderers is not None

    def offered(*parameters: Parameter) -> list[str]:
        assert model.renderers is not None
        schema = replace(READ, parameters=parameters).function_schema()
        [tool] = model.renderers.find(Opening(tools=read_tools([schema]))).grammar.tools
        return [parameter.name for parameter in tool.parameters]

    assert offered(Parameter("path", ""), Parameter("follow", "", required=False)) == ["path"]
    with pytest.raises(BadRequestError, match="follow"):
        offered(Parameter("path", ""), Parameter("follow", ""))
