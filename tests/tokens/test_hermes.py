import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_builders import HERMES, TYPED_TOOLS

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens.grammar import HermesGrammar, Parameter, ToolSchema, parse_calls, read_value
from etude.tokens.pieces import Control, spell


def parse(text, size=None):
    """Calls of a message in plain characters, fed whole or `size` characters at a time."""
    step = size or max(1, len(text))
    return parse_calls(HERMES.parser(True), [text[i : i + step] for i in range(0, len(text), step)])


def parse_tokens(text):
    """Calls of a message whose tags are control tokens."""
    return parse_calls(HERMES.parser(False), HERMES.split(text))


def call_of(body):
    """The one call with this body, the same in both modes and by character."""
    message = f"<tool_call>{body}</tool_call>"
    (call,) = parse(message)
    assert parse(message, 1) == [call]
    assert parse_tokens(message) == [call]
    return call


def test_calls_are_found_between_free_text():
    message = (
        'I look.\n<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py", "offset": 3}}\n'
        '</tool_call>\n<tool_call>{"arguments":{"path":"b.py"},"name":"read_file"}</tool_call> then '
        '<tool_call>{"name": "finish"}</tool_call>'
    )
    expected = [
        ToolCall("read_file", {"path": "a.py", "offset": "3"}),
        ToolCall("read_file", {"path": "b.py"}),
        ToolCall("finish"),
    ]
    assert parse(message) == parse_tokens(message) == parse(message, 1) == expected


def test_values_that_are_no_strings_are_kept_as_they_are_written():
    call = call_of(
        '{"name": "plan", "arguments": {"todos": [ {"id":1, "text":"\\u00e9]"} ], "merge": true,'
        ' "weight": 1.50, "extra": {}}}'
    )
    assert call == ToolCall(
        "plan",
        {"todos": '[ {"id":1, "text":"\\u00e9]"} ]', "merge": "true", "weight": "1.50", "extra": "{}"},
    )


def test_escapes_mean_what_json_says():
    call = call_of(
        r'{"name": "edit", "arguments": {"path": "\u0061\/\ud83d\ude00", "text": "\"\\\n\t\u0000"}}'
    )
    assert call == ToolCall("edit", {"path": "a/\U0001f600", "text": '"\\\n\t\0'})


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        ("", "", "no JSON"),
        ("  \n", "", "no JSON"),
        ("read_file", "", "read_file is not JSON"),
        ("[]", "", "not a JSON object"),
        ('"x"', "", "not a JSON object"),
        ("{}", "", "missing name"),
        ('{"arguments": {}}', "", "missing name"),
        ('{"name": 1, "arguments": {}}', "", "name is not a string"),
        ('{"name": ["edit"], "arguments": {}}', "", "name is not a string"),
        ('{"name": "finish", "arguments": []}', "finish", "arguments are not an object"),
        ('{"name": "finish", "arguments": "{}"}', "finish", "arguments are not an object"),
        ('{"name": "finish", "id": 7}', "finish", "unknown key id"),
        ('{"name": "finish", "name": "finish"}', "finish", "repeated name"),
        ('{"name": "open\\nfile", "arguments": {}}', "open\nfile", "unknown tool open?file"),
        ('{"name": "read_file", "arguments": {}}', "read_file", "missing path"),
        ('{"name": "read_file", "arguments": {"path": "a", "x": 1}}', "read_file", "unknown parameter x"),
        ('{"name": "read_file", "arguments": {"path": "a", "path": "b"}}', "read_file", "repeated path"),
        ('{"name": "plan", "arguments": {"todos": [{"a": 1, "a": 2}]}}', "plan", "repeated a"),
        ('{"name": "read_file", "arguments": {"path": 1}}', "read_file", "path is not a string"),
        ('{"name": "read_file", "arguments": {"path": null}}', "read_file", "path is null"),
        (
            '{"name": "read_file", "arguments": {"path": "a", "offset": null}}',
            "read_file",
            "offset is null: leave it out",
        ),
        (
            '{"name": "read_file", "arguments": {"path": "a", "offset": "3"}}',
            "read_file",
            "offset is not an integer",
        ),
        (
            '{"name": "read_file", "arguments": {"path": "a", "offset": 3.5}}',
            "read_file",
            "offset is not an integer",
        ),
        ('{"name": "plan", "arguments": {"todos": {}}}', "plan", "todos is not an array"),
        ('{"name": "plan", "arguments": {"todos": NaN}}', "plan", "NaN is not JSON"),
        ('{"name": "plan", "arguments": {"todos": [-Infinity]}}', "plan", "-Infinity is not JSON"),
        ('{"name": "plan", "arguments": {"todos": [01]}}', "plan", "01 is not JSON"),
        ('{"name": "plan", "arguments": {"todos": [-1e999]}}', "plan", "number too large"),
        ('{"name": "plan", "arguments": {"todos": [1,]}}', "plan", "unexpected ] in the JSON"),
        ('{"name": "plan", "arguments": {"todos": [1}}', "plan", "unexpected } in the JSON"),
        ('{"name": "plan", "arguments": {"todos": [' + "1" * 401 + "]}}", "plan", "number too long"),
        ('{"name": "finish", "arguments": {', "finish", "the JSON is cut off"),
        ('{"name": "finish"} done', "finish", "text after the JSON"),
        ('{"name": "finish"}{"name": "finish"}', "finish", "text after the JSON"),
        ("{'name': 'finish'}", "", "unexpected ' in the JSON"),
        ('{"name": "edit", "arguments": {"path": "a\nb"}}', "edit", "control character in a string"),
        ('{"name": "edit", "arguments": {"path": "\0"}}', "edit", "control character in a string"),
        ('{"name": "edit", "arguments": {"path": "\\ud800 alone"}}', "edit", "half a surrogate pair"),
        ('{"name": "edit", "arguments": {"path": "\\udc00 alone"}}', "edit", "half a surrogate pair"),
        ('{"name": "edit", "arguments": {"path": "\ud800"}}', "edit", "half a surrogate pair"),
        ('{"name": "edit", "arguments": {"path": "\\x41"}}', "edit", "unknown escape in a string"),
        ('{"name": "edit", "arguments": {"path": "\\u00g1"}}', "edit", "unknown escape in a string"),
        ('{"name": "' + "x" * 65 + '"}', "", "name too long"),
        ('{"' + "x" * 300 + '": 1}', "", "key too long"),
    ],
)
def test_malformed_calls_say_what_is_wrong(body, name, error):
    call = call_of(body)
    assert (call.name, call.error) == (name, error)
    following = f"<tool_call>{body}</tool_call>" + '<tool_call>{"name": "finish"}</tool_call>'
    assert parse(following)[-1] == parse_tokens(following)[-1] == ToolCall("finish")


def test_tags_out_of_place_say_so():
    opened = '<tool_call>{"name": "finish"}'
    assert [c.error for c in parse(opened)] == ["unclosed tool_call"]
    assert [c.error for c in parse(opened + opened + "</tool_call>")] == ["unclosed tool_call", None]
    assert [c.error for c in parse(opened + "</tool_call></tool_call>")] == [None, "stray /tool_call"]
    spoiled = [Control("<tool_call>"), Control("<|user|>"), '{"name": "finish"}', Control("</tool_call>")]
    (call,) = parse_calls(HERMES.parser(False), spoiled)
    assert call.error == "control token in a call"
    assert parse_calls(
        HERMES.parser(False), [Control("<|user|>"), *HERMES.split(opened + "</tool_call>")]
    ) == [ToolCall("finish")]


def test_depth_is_bounded():
    deep = '{"name": "plan", "arguments": {"todos": ' + "[" * 62 + "]" * 62 + "}}"
    assert call_of(deep).error is None
    for depth in (63, 100_000):
        body = '{"name": "plan", "arguments": {"todos": ' + "[" * depth + "]" * depth + "}}"
        (call,) = parse(f"<tool_call>{body}</tool_call>")
        assert call.error == "nested deeper than 64"


def test_tags_in_strings_are_escaped_and_come_back():
    for value in ("</tool_call>", "<tool_call>{}</tool_call>", "<think>", "</think>"):
        call = ToolCall("edit", {"path": "a", "text": value})
        pieces = HERMES.render_call(call)
        assert parse_calls(HERMES.parser(False), pieces) == [call]
        assert parse(spell(pieces)) == [call]
    unescaped = '<tool_call>{"name": "edit", "arguments": {"path": "a", "text": "</tool_call>"}}</tool_call>'
    assert parse(unescaped)[0].error == "the JSON is cut off"
    (call,) = parse_calls(
        HERMES.parser(False), [Control("<tool_call>"), unescaped[11:-12], Control("</tool_call>")]
    )
    assert call == ToolCall("edit", {"path": "a", "text": "</tool_call>"})


floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | floats | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def as_json(values):
    return values.map(lambda value: json.dumps(value, ensure_ascii=False))


well_typed = st.one_of(
    st.builds(
        lambda path, n: ToolCall("read_file", {"path": path, "offset": str(n)}), st.text(), st.integers()
    ),
    st.builds(lambda text: ToolCall("edit", {"path": "a", "text": text}), st.text()),
    st.builds(
        lambda todos, merge, weight, extra: ToolCall(
            "plan", {"todos": todos, "merge": merge, "weight": weight, "extra": extra}
        ),
        as_json(st.lists(json_values, max_size=3)),
        st.sampled_from(["true", "false"]),
        as_json(floats | st.integers()),
        as_json(st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    ),
    st.just(ToolCall("finish")),
)


@given(st.lists(well_typed, max_size=3), st.integers(1, 40))
def test_rendered_calls_parse_back(given_calls, size):
    pieces = [piece for call in given_calls for piece in HERMES.render_call(call)]
    assert parse_calls(HERMES.parser(False), pieces) == given_calls
    assert parse(spell(pieces), size) == given_calls


@given(well_typed)
def test_what_is_rendered_is_what_python_reads(call):
    body = spell(HERMES.render_call(call)).removeprefix("<tool_call>").removesuffix("</tool_call>")
    read = json.loads(body)
    parameters = {p.name: p for tool in TYPED_TOOLS if tool.name == call.name for p in tool.parameters}
    assert read["name"] == call.name
    for name, value in read["arguments"].items():
        if parameters[name].kind == "string":
            assert value == call.arguments[name]
        else:
            assert value == json.loads(call.arguments[name])


@given(st.text(alphabet=st.sampled_from('{}[]:,"\\ \ntruefalsn0123456789.eE+-u\0é'), max_size=24))
def test_json_is_judged_as_python_judges_it(text):
    body = '{"name": "plan", "arguments": {"todos": [' + text + "]}}"

    def refuse_repeats(pairs):
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError
        return dict(pairs)

    def refuse_constant(name):
        raise ValueError(name)

    try:
        value = json.loads(body, object_pairs_hook=refuse_repeats, parse_constant=refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
        expected = value["arguments"]["todos"]
    except (ValueError, KeyError):
        expected = None
    (call,) = parse(f"<tool_call>{body}</tool_call>")
    if expected is None or value.keys() != {"name", "arguments"} or value["name"] != "plan":
        assert call.error is not None
    elif value["arguments"].keys() == {"todos"}:
        assert call.error is None
        assert json.loads(call.arguments["todos"]) == expected
        assert read_value(Parameter("todos", "", kind="array"), call.arguments["todos"]) == expected


def test_ill_typed_calls_of_other_grammars_render_as_errors_to_be_seen():
    pieces = HERMES.render_call(ToolCall("read_file", {"path": "a", "offset": "three"}))
    (call,) = parse_calls(HERMES.parser(False), pieces)
    assert call == ToolCall("read_file", {"path": "a", "offset": "three"}, "offset is not an integer")


def test_names_that_cannot_be_written_are_refused():
    for tools in (
        [ToolSchema("", "")],
        [ToolSchema("a\nb", "")],
        [ToolSchema("a", ""), ToolSchema("a", "")],
        [ToolSchema("a", "", (Parameter("p", ""), Parameter("p", "")))],
        [ToolSchema("a", "", (Parameter("<tool_call>", ""),))],
    ):
        with pytest.raises(ConfigError):
            HermesGrammar(tools)
    assert HermesGrammar([ToolSchema("github.create-issue", "", (Parameter("Repo Name", ""),))])


def test_tools_are_announced_in_the_words_of_qwens_template():
    tool = ToolSchema(
        "read_file",
        "Read “</tool_call>”.",
        (Parameter("path", "file"), Parameter("mode", "how", required=False, enum=("a", "b"))),
    )
    pieces = HERMES.announce([tool])
    assert spell(pieces) == (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "read_file", "description": "Read “</tool_call>”.", '
        '"parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "file"}, '
        '"mode": {"type": "string", "description": "how", "enum": ["a", "b"]}}, "required": ["path"], '
        '"additionalProperties": false}}}\n</tools>\n\nFor each function call, return a json object with '
        "function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    assert [piece.name for piece in pieces if isinstance(piece, Control)] == [
        "<tool_call>",
        "</tool_call>",
    ] * 2
