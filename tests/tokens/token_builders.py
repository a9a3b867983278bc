"""Small tokenizers and tools for the tests of tokens."""

from collections.abc import Iterable
from functools import cache

import tokenizers
from tokenizers import AddedToken

from etude.tokens import ETUDE_TEMPLATE, QWEN3_TEMPLATE, Renderer, Tokenizer, train_tokenizer
from etude.tokens.grammar import (
    ArgumentDelta,
    HermesGrammar,
    NativeGrammar,
    Parameter,
    ParseEvent,
    ReasoningDelta,
    TextDelta,
    ToolSchema,
    XmlGrammar,
)
from etude.tokens.grammar.call_forms import CALL_FORMS

TOOLS = (
    ToolSchema(
        "read_file", "Read.", (Parameter("path", "file"), Parameter("offset", "line", required=False))
    ),
    ToolSchema("edit", "Edit.", (Parameter("path", "file"), Parameter("text", "new text"))),
    ToolSchema("finish", "End."),
)

TYPED_TOOLS = (
    ToolSchema(
        "read_file",
        "Read “a file”.",
        (Parameter("path", "file"), Parameter("offset", "line", required=False, kind="integer")),
    ),
    ToolSchema("edit", "Edit.", (Parameter("path", "file"), Parameter("text", "new text"))),
    ToolSchema(
        "plan",
        "Plan.",
        (
            Parameter("todos", "what is to be done", kind="array", schema={"items": {"type": "object"}}),
            Parameter("merge", "keep the others", required=False, kind="boolean"),
            Parameter("weight", "how much", required=False, kind="number"),
            Parameter("extra", "anything", required=False, kind="object"),
            Parameter("mode", "how", required=False, enum=("fast", "slow")),
        ),
    ),
    ToolSchema("finish", "End."),
)

CODE = '''"""Adds up what is above a."""


def tally(xs, a):
    total = 0
    for x in xs:
        if x > a:
            total += x
    return total


def test_tally():
    assert tally([1, 22, 3], 2) == 25
'''

TEXTS = [
    CODE,
    *(
        f"lib/tally.py:{n}: def tally(xs, a):\n{n}\t    total = {n}\ntest_tally fails\nFAIL test_drift\n"
        for n in range(30)
    ),
]

GRAMMAR = XmlGrammar(TOOLS)
HERMES = HermesGrammar(TYPED_TOOLS)
TYPED_XML = XmlGrammar(TYPED_TOOLS)
NATIVE = [NativeGrammar(form, TYPED_TOOLS) for form in CALL_FORMS]


@cache
def small_tokenizer() -> Tokenizer:
    """With every control token of the template and of TOOLS."""
    names = [*ETUDE_TEMPLATE.control_tokens, *GRAMMAR.control_tokens()]
    return train_tokenizer(TEXTS * 4, 420, names)


@cache
def foreign_tokenizer() -> Tokenizer:
    """With the template's control tokens alone, as another team's tokenizer would have."""
    return train_tokenizer(TEXTS * 4, 400, ETUDE_TEMPLATE.control_tokens)


@cache
def token_renderer() -> Renderer:
    return Renderer(small_tokenizer(), GRAMMAR)


@cache
def text_renderer() -> Renderer:
    return Renderer(foreign_tokenizer(), GRAMMAR)


QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@cache
def qwen_tokenizer() -> Tokenizer:
    """A small tokenizer with Qwen3's marks: those of messages special, those of calls and reasoning not."""
    base = train_tokenizer(TEXTS * 4, 400, ["<|im_start|>", "<|im_end|>"])
    whole = tokenizers.Tokenizer.from_str(base._definition)
    whole.add_tokens([AddedToken(name, special=False, normalized=False) for name in QWEN_ADDED])
    return Tokenizer(whole.to_str())


@cache
def qwen_renderer() -> Renderer:
    return Renderer(qwen_tokenizer(), HERMES, QWEN3_TEMPLATE)


@cache
def native_renderer() -> Renderer:
    return Renderer(qwen_tokenizer(), NATIVE[0], QWEN3_TEMPLATE)


@cache
def hermes_text_renderer() -> Renderer:
    return Renderer(foreign_tokenizer(), HERMES)


def merge_deltas(events: Iterable[ParseEvent]) -> list[ParseEvent]:
    """Neighbouring deltas of one kind (and one argument) as one: equal for every way to cut a message."""
    merged: list[ParseEvent] = []
    run: list[str] = []

    def close() -> None:
        if run:
            last = merged[-1]
            text = "".join(run)
            if isinstance(last, ArgumentDelta):
                merged[-1] = ArgumentDelta(last.name, text)
            elif isinstance(last, TextDelta | ReasoningDelta):
                merged[-1] = type(last)(text)
            run.clear()

    for event in events:
        if not isinstance(event, TextDelta | ReasoningDelta | ArgumentDelta):
            close()
            merged.append(event)
            continue
        if not (run and _same_run(merged[-1], event)):
            close()
            merged.append(event)
        run.append(event.text)
    close()
    return merged


def _same_run(last: ParseEvent, event: ParseEvent) -> bool:
    if isinstance(last, ArgumentDelta) and isinstance(event, ArgumentDelta):
        return last.name == event.name
    return type(last) is type(event)
