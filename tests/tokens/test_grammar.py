import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_builders import GRAMMAR, TOOLS

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens.grammar import Parameter, ToolSchema, XmlGrammar, parse_calls
from etude.tokens.pieces import Control, spell


def parse(text):
    """Calls of a message whose tags are control tokens."""
    return parse_calls(GRAMMAR.parser(text_mode=False), GRAMMAR.split(text))


def parse_text(text, size=None):
    """Calls of a message in plain characters, fed whole or `size` characters at a time."""
    step = size or max(1, len(text))
    return parse_calls(
        GRAMMAR.parser(text_mode=True), [text[i : i + step] for i in range(0, len(text), step)]
    )


def test_calls_are_found_between_free_text():
    message = (
        "Look first. <read_file><path>a.py</path></read_file>then\n<read_file>\n<path>b.py</path>\n"
        "<offset>3</offset>\n</read_file><finish></finish> done"
    )
    expected = [
        ToolCall("read_file", {"path": "a.py"}),
        ToolCall("read_file", {"path": "b.py", "offset": "3"}),
        ToolCall("finish"),
    ]
    assert parse(message) == expected
    assert parse_text(message) == expected


malformed = pytest.mark.parametrize(
    ("message", "name", "error"),
    [
        ("<read_file><path>a.py</path>", "read_file", "unclosed read_file"),
        ("<read_file><path>a.py", "read_file", "unclosed path"),
        ("<read_file></read_file>", "read_file", "missing path"),
        ("<read_file><text>x</text><path>a</path></read_file>", "read_file", "unknown parameter text"),
        ("<read_file><path>a</path><path>b</path></read_file>", "read_file", "repeated path"),
        ("<read_file>now <path>a</path></read_file>", "read_file", "text outside of parameters"),
        ("<read_file><path>a</path></text></read_file>", "read_file", "stray /text"),
        ("<read_file><path>a</path></edit>", "read_file", "read_file closed by /edit"),
        ("</read_file>", "read_file", "stray /read_file"),
        ("<path>a</path>", "", "stray path"),
        ("hm </path> so", "", "stray /path"),
        ("<open_file><path>a</path></open_file>", "open_file", "unknown tool open_file"),
    ],
)


@malformed
def test_malformed_calls_say_what_is_wrong(message, name, error):
    (call,) = parse(message)
    assert (call.name, call.error) == (name, error)
    (call,) = parse_text(message)
    assert (call.name, call.error) == (name, error)


@malformed
def test_a_malformed_call_does_not_hide_the_next(message, name, error):
    following = "<finish></finish>"
    assert parse(message + following)[-1] == ToolCall("finish")


def test_an_unclosed_body_ends_with_its_tool_where_tags_are_tokens():
    calls = parse("<edit><path>a</path><text>x</edit><finish></finish>")
    assert [call.error for call in calls] == ["unclosed text", None]
    assert calls[0].arguments == {"path": "a"}


def test_an_unknown_tool_takes_its_parameters_and_ends_with_its_own_tag():
    calls = parse("<open_file><path>a</path></open_file> then <finish></finish>")
    assert calls == [
        ToolCall("open_file", {"path": "a"}, "unknown tool open_file"),
        ToolCall("finish"),
    ]


def test_tags_in_characters_are_text_where_tags_are_tokens():
    body = "s = '</text></edit><finish></finish>'"
    pieces = [
        *GRAMMAR.split("<edit><path>a.py</path><text>"),
        body,
        *GRAMMAR.split("</text></edit>"),
    ]
    assert parse_calls(GRAMMAR.parser(text_mode=False), pieces) == [
        ToolCall("edit", {"path": "a.py", "text": body})
    ]


def test_a_body_in_text_mode_ends_at_its_own_closing_tag_only():
    body = "s = '</edit><finish></finish><path>'"
    assert parse_text(f"<edit><path>a.py</path><text>{body}</text></edit>") == [
        ToolCall("edit", {"path": "a.py", "text": body})
    ]
    cut = parse_text("<edit><path>a.py</path><text>s = '</text>'</text></edit>")
    assert cut[0].error == "text outside of parameters"


def test_foreign_control_tokens_spoil_a_call_and_nothing_else():
    foreign = Control("<|user|>")
    inside = parse_calls(GRAMMAR.parser(False), [Control("<finish>"), foreign, Control("</finish>")])
    assert inside == [ToolCall("finish", {}, "control token in a call")]
    outside = parse_calls(GRAMMAR.parser(False), [foreign, Control("<finish>"), Control("</finish>")])
    assert outside == [ToolCall("finish")]


def test_one_newline_at_each_end_of_a_body_is_layout():
    (call,) = parse("<edit><path>a</path><text>\n\n    x = 1\n\n</text></edit>")
    assert call.arguments["text"] == "\n    x = 1\n"


calls = st.one_of(
    st.builds(lambda path: ToolCall("read_file", {"path": path}), st.text()),
    st.builds(
        lambda path, text: ToolCall("edit", {"path": path, "text": text}),
        st.text(),
        st.text(alphabet=st.sampled_from("\n ab<>/"), max_size=8),
    ),
    st.just(ToolCall("finish")),
)


@given(st.lists(calls, max_size=4))
def test_rendered_calls_parse_back(given_calls):
    pieces = [piece for call in given_calls for piece in GRAMMAR.render_call(call)]
    assert parse_calls(GRAMMAR.parser(text_mode=False), pieces) == given_calls


@given(st.lists(calls, max_size=4), st.integers(1, 9))
def test_rendered_calls_parse_back_from_text(given_calls, size):
    text = "".join(spell(GRAMMAR.render_call(call)) for call in given_calls)
    values = [(n, v) for call in given_calls for n, v in call.arguments.items()]
    if any(f"</{name}>" in value for name, value in values):
        return
    assert parse_text(text, size) == given_calls


fragments = st.one_of(
    st.sampled_from([*GRAMMAR.control_tokens(), "<open>", "</open>", "<", "</", ">", "\n", " ", "path"]),
    st.text(max_size=3),
)


@given(st.lists(fragments, max_size=30), st.integers(1, 7))
def test_text_mode_gives_the_same_calls_however_the_text_is_cut(parts, size):
    text = "".join(parts)
    whole = parse_text(text)
    assert parse_text(text, size) == whole
    assert len(whole) <= len(parts) + 1


pieces_of_noise = st.one_of(
    st.builds(Control, st.sampled_from([*GRAMMAR.control_tokens(), "<|user|>", "<result>"])),
    st.text(alphabet=st.sampled_from("<>/ \nopenfil_"), max_size=12),
)


@given(st.lists(pieces_of_noise, max_size=40))
def test_any_pieces_give_calls_with_known_names_or_errors(pieces):
    names = {tool.name for tool in TOOLS}
    for call in parse_calls(GRAMMAR.parser(text_mode=False), pieces):
        assert call.error or call.name in names
        assert call.error is None or len(call.error) < 80


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    ["<", "<path>", "</", "<edit>", "<edit><text>x", "x<y", "</read_file>", "<open_file><path></path>"],
)
def test_parsing_takes_linear_time(unit):
    def seconds(count):
        text = unit * count
        start_s = time.process_time()
        parse_text(text)
        parse(text)
        return time.process_time() - start_s

    small = min(seconds(500) for _ in range(3))
    large = min(seconds(4_000) for _ in range(2))
    assert large < 8 * 4 * small + 0.05


def test_splitting_is_the_inverse_of_spelling():
    text = "<edit><path>a</path><text>\nx < y </b>\n</text></edit>"
    assert spell(GRAMMAR.split(text)) == text


def test_names_that_cannot_be_tags_are_refused():
    with pytest.raises(ConfigError):
        XmlGrammar([ToolSchema("path", "", (Parameter("path", ""),))])
    with pytest.raises(ConfigError):
        XmlGrammar([ToolSchema("Read File", "")])
    with pytest.raises(ConfigError):
        XmlGrammar([ToolSchema("finish", ""), ToolSchema("finish", "")])


def test_schemas_become_json_schema():
    assert TOOLS[0].json_schema() == {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "file"},
            "offset": {"type": "string", "description": "line"},
        },
        "required": ["path"],
        "additionalProperties": False,
    }
