import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_builders import (
    HERMES,
    NATIVE,
    TYPED_TOOLS,
    TYPED_XML,
    hermes_text_renderer,
    merge_deltas,
    native_renderer,
    qwen_renderer,
    qwen_tokenizer,
    text_renderer,
    token_renderer,
)

from etude.records import ToolCall
from etude.tokens import MessageStream
from etude.tokens.grammar import (
    ArgumentDelta,
    CallFinished,
    CallStarted,
    ReasoningDelta,
    TextDelta,
    collect,
    parse_calls,
    parse_events,
)
from etude.tokens.pieces import Control, spell

GRAMMARS = [TYPED_XML, HERMES, *NATIVE]
READ = ToolCall("read_file", {"path": "a.py"})
FINISH = ToolCall("finish")
both = pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.name)


def events_of(grammar, text, text_mode=True, size=None, **options):
    pieces = [text] if text_mode else grammar.split(text)
    if size:
        pieces = [p if isinstance(p, Control) else p[i : i + size] for p in pieces
                  for i in (range(0, len(p), size) if isinstance(p, str) else [0])]  # fmt: skip
    return merge_deltas(parse_events(grammar.parser(text_mode, **options), pieces))


def written(grammar, *calls):
    return "".join(spell(grammar.render_calls([call], False)).lstrip("\n") for call in calls)


@both
@pytest.mark.parametrize("text_mode", [True, False])
def test_a_message_is_told_in_its_order(grammar, text_mode):
    message = "<think>Which?</think>I look." + written(grammar, READ) + " Then" + written(grammar, FINISH)
    expected = [
        ReasoningDelta("Which?"),
        TextDelta("I look."),
        CallStarted("read_file"),
        ArgumentDelta("path", "a.py"),
        CallFinished(READ),
        TextDelta(" Then"),
        CallStarted("finish"),
        CallFinished(FINISH),
    ]
    assert events_of(grammar, message, text_mode) == expected
    assert events_of(grammar, message, text_mode, size=1) == expected


@both
@pytest.mark.parametrize("text_mode", [True, False])
def test_calls_inside_reasoning_are_no_calls(grammar, text_mode):
    message = f"<think>maybe {written(grammar, READ)}</think>{written(grammar, FINISH)}"
    parsed = collect(events_of(grammar, message, text_mode))
    assert parsed.calls == (FINISH,)
    assert parsed.reasoning == "maybe " + written(grammar, READ)
    unclosed = collect(events_of(grammar, "<think>" + written(grammar, READ), text_mode))
    assert (unclosed.calls, unclosed.reasoning) == ((), written(grammar, READ))


@both
def test_a_message_may_begin_inside_reasoning(grammar):
    message = f"so{written(grammar, READ)}</think>{written(grammar, FINISH)}"
    assert collect(events_of(grammar, message, begun=True)).calls == (FINISH,)
    assert collect(events_of(grammar, message)).calls == (READ, FINISH)


@both
def test_marks_of_reasoning_inside_a_call_are_text(grammar):
    call = ToolCall("edit", {"path": "a", "text": "<think>x</think>"})
    for text_mode in (True, False):
        assert collect(events_of(grammar, written(grammar, call), text_mode)).calls == (call,)
    pieces = grammar.split(written(grammar, call))
    assert Control("<think>") in pieces
    assert parse_calls(grammar.parser(False, "control"), pieces) == [call]


@both
def test_marks_in_characters_are_text_where_they_are_tokens(grammar):
    message = "about <think>" + written(grammar, FINISH)
    as_tokens = [message[:13], *grammar.split(message[13:])]
    assert parse_calls(grammar.parser(False, "control"), as_tokens) == [FINISH]
    assert parse_calls(grammar.parser(False, "text"), as_tokens) == []
    assert parse_calls(grammar.parser(True, "off"), [message]) == [FINISH]


@both
def test_only_what_may_become_a_tag_is_held_back(grammar):
    parser = grammar.parser(True)
    assert parser.feed_events("if a < b: x <") == [TextDelta("if a < b: x ")]
    assert parser.feed_events("t") == []
    assert parser.feed_events("z") == [TextDelta("<tz")]
    assert parser.feed_events(" </") == [TextDelta(" ")]
    assert parser.finish_events() == [TextDelta("</")]


def test_arguments_stream_as_they_come():
    parser = HERMES.parser(True)
    parser.feed_events('<tool_call>{"name": "edit", ')
    assert parser.feed_events('"arguments": {"text": "one\\n tw') == [ArgumentDelta("text", "one\n tw")]
    parser = TYPED_XML.parser(True)
    assert parser.feed_events("<edit><text>\none\n") == [CallStarted("edit"), ArgumentDelta("text", "one")]
    assert parser.feed_events("two\n</text") == [ArgumentDelta("text", "\ntwo")]
    assert parser.feed_events("></edit>")[-1].call.arguments == {"text": "one\ntwo"}


def test_arguments_before_the_name_are_told_after_it():
    message = '<tool_call>{"arguments": {"path": "a", "offset": 1}, "name": "read_file"}</tool_call>'
    assert events_of(HERMES, message, size=3)[:3] == [
        CallStarted("read_file"),
        ArgumentDelta("path", "a"),
        ArgumentDelta("offset", "1"),
    ]


def fragments(grammar):
    marks = [
        "<think>",
        "</think>",
        "<open_file>",
        "</open_file>",
        "<",
        "</",
        ">",
        "\n",
        '"',
        "\\",
        "{",
        "}",
        "x",
    ]
    form = getattr(grammar, "form", None)
    words = [*form.section, *form.call, form.name_end, *form.key, *form.value] if form else []
    return st.sampled_from(
        [*grammar.control_tokens(), *marks, *words, written(grammar, READ), written(grammar, FINISH)]
    )


messages = st.sampled_from(GRAMMARS).flatmap(
    lambda grammar: st.tuples(
        st.just(grammar), st.lists(fragments(grammar) | st.text(max_size=3), max_size=16).map("".join)
    )
)


@given(messages, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_events_do_not_depend_on_how_a_message_is_cut(message, text_mode, sizes, begun):
    grammar, text = message
    pieces = [text] if text_mode else grammar.split(text)
    whole = parse_events(grammar.parser(text_mode, None, begun), pieces)
    parts, turn = [], 0
    for piece in pieces:
        position = 0
        while isinstance(piece, str) and position < len(piece):
            parts.append(piece[position : position + sizes[turn % len(sizes)]])
            position, turn = position + len(parts[-1]), turn + 1
        if isinstance(piece, Control):
            parts.append(piece)
    assert merge_deltas(parse_events(grammar.parser(text_mode, None, begun), parts)) == merge_deltas(whole)
    fed = grammar.parser(text_mode, None, begun)
    assert parse_calls(fed, parts) == [e.call for e in whole if isinstance(e, CallFinished)]


@given(messages)
def test_events_are_well_formed(message):
    grammar, text = message
    told = None
    for event in parse_events(grammar.parser(True), [text]):
        if isinstance(event, CallStarted):
            assert told is None
            told = {}
        elif isinstance(event, ArgumentDelta):
            assert told is not None and event.text
            told[event.name] = told.get(event.name, "") + event.text
        elif isinstance(event, CallFinished):
            assert told is not None
            if event.call.error is None:
                assert told == {name: value for name, value in event.call.arguments.items() if value}
            told = None
        else:
            assert event.text
    assert told is None


values = st.text(alphabet=st.sampled_from('ab<>/ \n"\\{}é'), max_size=10)
plain_calls = st.one_of(
    st.builds(lambda a, b: ToolCall("edit", {"path": a, "text": b}), values, values), st.just(FINISH)
)
words = st.text(alphabet=st.sampled_from("ab \n>é"), max_size=6)


@given(st.sampled_from(GRAMMARS), st.lists(st.tuples(words, st.booleans(), plain_calls), max_size=4))
def test_both_modes_say_the_same_of_what_both_can_carry(grammar, parts):
    text = "".join(
        (f"<think>{word}</think>" if thought else word) + written(grammar, call)
        for word, thought, call in parts
    )
    as_text = events_of(grammar, text)
    assert as_text == events_of(grammar, text, text_mode=False)
    assert [e.call for e in as_text if isinstance(e, CallFinished)] == [call for _, _, call in parts]


RENDERERS = [token_renderer, text_renderer, qwen_renderer, native_renderer, hermes_text_renderer]


MESSAGES = [["é😀 ", READ], ["<think>é", FINISH], [FINISH, READ]]
positions = st.integers(0, 1 << 20)


@pytest.mark.parametrize("make", RENDERERS)
@given(st.sampled_from(MESSAGES), positions, st.lists(positions, max_size=20), st.lists(st.integers(1, 5)))
def test_streams_of_tokens_say_what_the_whole_message_says(make, parts, at, noise, sizes):
    renderer = make()
    message = renderer.message(parts)
    tags = [*renderer.tags, renderer.end_token]
    ids = [tags[n // 2 % len(tags)] if n % 2 else n // 2 % renderer.tokenizer.vocab_size for n in noise]
    tokens = np.insert(message, at % (len(message) + 1), np.array(ids, dtype=np.int32))
    stream, events, position = MessageStream(renderer), [], 0
    for size in [*sizes, len(tokens)]:
        events += stream.feed(tokens[position : position + size])
        position += size
    events += stream.finish()
    assert merge_deltas(events) == merge_deltas(renderer.parse_events(tokens))
    assert [e.call for e in events if isinstance(e, CallFinished)] == renderer.parse(tokens)


def test_renderers_choose_how_reasoning_is_marked():
    assert qwen_renderer().reasoning == "control"
    assert token_renderer().reasoning == "off"
    assert text_renderer().reasoning == "text"
    message = token_renderer().message(["<think>so</think>", FINISH])
    assert token_renderer().read(message).text == "<think>so</think>"
    assert text_renderer().read(text_renderer().message(["<think>so</think>", FINISH])).reasoning == "so"


def test_qwens_tags_are_single_tokens_though_not_special():
    renderer = qwen_renderer()
    assert not renderer.text_mode
    message = renderer.message(["<think>\nso\n</think>\n\n", READ])
    control = [name for name in message.tolist() if name in renderer.tags]
    assert [renderer.tags[index].name for index in control] == [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ]
    parsed = renderer.read(message)
    assert (parsed.reasoning, parsed.text, parsed.calls) == ("\nso\n", "\n\n", (READ,))
    assert renderer.read(message[:-1]) == parsed
    assert qwen_tokenizer().pieces(message)[0].startswith("<think>")  # without the grammar: text, as ever


def test_a_session_reads_as_qwen3s_template_says():
    renderer = qwen_renderer()
    announced = renderer.grammar.announce(TYPED_TOOLS[3:])
    calls = [ToolCall("read_file", {"path": "lib/tally.py", "offset": "3"}), FINISH]
    session = np.concatenate(
        [
            renderer.prompt("Mend it.", ["Be brief.\n\n", *announced]),
            renderer.message(["<think>\nWhich?\n</think>\n\nI look.", *calls]),
            renderer.observations(["1\tx", "ok"]),
        ]
    )
    text = renderer.tokenizer.decode(session)
    assert text == (
        "<|im_start|>system\nBe brief.\n\n" + spell(announced) + "<|im_end|>\n"
        "<|im_start|>user\nMend it.<|im_end|>\n<|im_start|>assistant\n"
        "<think>\nWhich?\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "lib/tally.py", "offset": 3}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\tx\n</tool_response>\n<tool_response>\nok\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    marks = {
        renderer.tokenizer.control_id(name) for name in ("<tool_call>", "</tool_call>", "<tool_response>")
    }
    assert sum(index in marks for index in session.tolist()) == 4 + 4 + 2


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    "unit", ["<", "<think></think>", "</thin", "<tool_call>", '{"a":', "[1],", "\\n", "\\ud83d"]
)
def test_time_is_linear_by_character(grammar, unit):
    kimi = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.plan:0<|tool_call_argument_begin|>"
        '{"todos": ["'
    )
    heads = {
        "xml": "<edit><text>",
        "hermes": '<tool_call>{"name": "plan", "arguments": {"todos": ["',
        "qwen_xml": "<tool_call>\n<function=edit>\n<parameter=text>\n",
        "minimax_xml": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="text">',
        "glm_xml": "<tool_call>edit\n<arg_key>text</arg_key>\n<arg_value>",
        "glm_xml_dense": "<tool_call>edit<arg_key>text</arg_key><arg_value>",
        "kimi_json": kimi,
        "kimi_json_restarting": kimi,
    }

    def seconds(count):
        start_s = time.process_time()
        for head in ("", heads[grammar.name]):
            parser = grammar.parser(True)
            for character in head + unit * (count // len(unit)):
                parser.feed_events(character)
            parser.finish_events()
        return time.process_time() - start_s

    small = min(seconds(1_000) for _ in range(3))
    large = min(seconds(8_000) for _ in range(2))
    assert large < 8 * 4 * small + 0.05
