import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_builders import TYPED_TOOLS, TYPED_XML

from etude.errors import ToolArgumentError
from etude.tokens.grammar import Parameter, ToolSchema, read_value

TODOS = Parameter(
    "todos",
    "items",
    kind="array",
    schema={
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "text": {"type": "string"},
                "status": {"enum": ["open", "done"]},
            },
            "required": ["id"],
            "additionalProperties": False,
        }
    },
)


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        (Parameter("p", ""), " a \n", " a \n"),
        (Parameter("p", "", enum=("a", "b")), "a", "a"),
        (Parameter("p", "", kind="integer"), " -12\n", -12),
        (Parameter("p", "", kind="integer", enum=(1, 2)), "2", 2),
        (Parameter("p", "", kind="number"), "3", 3),
        (Parameter("p", "", kind="number"), "-1.5e3", -1500.0),
        (Parameter("p", "", kind="boolean"), "true", True),
        (Parameter("p", "", kind="boolean"), "false\n", False),
        (Parameter("p", "", kind="array"), '[1, "a", null]', [1, "a", None]),
        (Parameter("p", "", kind="object"), '{"a": {"b": []}}', {"a": {"b": []}}),
        (TODOS, '[{"id": 1, "text": "x", "status": "done"}]', [{"id": 1, "text": "x", "status": "done"}]),
    ],
)
def test_arguments_are_read_by_their_kind(parameter, text, value):
    read = read_value(parameter, text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("parameter", "text", "message"),
    [
        (Parameter("p", "", enum=("a", "b")), "c", "none of its values"),
        (Parameter("p", "", kind="integer"), "3.0", "not an integer"),
        (Parameter("p", "", kind="integer"), "٣", "not an integer"),
        (Parameter("p", "", kind="integer"), "9" * 30, "not an integer"),
        (Parameter("p", "", kind="number"), "nan", "not a number"),
        (Parameter("p", "", kind="number"), "1e999", "not a number"),
        (Parameter("p", "", kind="boolean"), "True", "neither true nor false"),
        (Parameter("p", "", kind="array"), "a, b", "not JSON"),
        (Parameter("p", "", kind="array"), "{}", "not an array"),
        (Parameter("p", "", kind="object"), '{"a": 1, "a": 2}', "repeated a"),
        (Parameter("p", "", kind="object"), '{"a": NaN}', "NaN is not JSON"),
        (Parameter("p", "", kind="array"), "[1e999]", "number too large"),
        (Parameter("p", "", kind="array"), "[" * 100_000, "nested deeper"),
        (Parameter("p", "", kind="array"), "[" + "9" * 5000 + "]", "number too long"),
        (TODOS, '[{"text": "x"}]', r"todos\[0\] 'id' is a required property"),
        (TODOS, '[{"id": 1}, {"id": true}]', r"todos\[1\].id True is not of type 'integer'"),
        (TODOS, '[{"id": 1, "status": "late"}]', r"todos\[0\].status 'late' is not one of"),
        (TODOS, '[{"id": 1, "x": 2}]', r"todos\[0\] Additional properties are not allowed \('x'"),
        (TODOS, '["x"]', r"todos\[0\] 'x' is not of type 'object'"),
    ],
)
def test_values_that_do_not_fit_are_the_agents_error(parameter, text, message):
    with pytest.raises(ToolArgumentError, match=message) as caught:
        read_value(parameter, text)
    assert caught.value.field == parameter.name
    assert caught.value.fix
    assert len(str(caught.value.received)) <= 60


@given(st.sampled_from([p for tool in TYPED_TOOLS for p in tool.parameters]), st.text(max_size=20))
def test_any_text_is_a_value_or_the_agents_error(parameter, text):
    with contextlib.suppress(ToolArgumentError):
        read_value(parameter, text)


@pytest.mark.parametrize(
    "keywords",
    [
        {"required": True},
        {"type": 5},
        {"type": [["object"]]},
        {"enum": None},
        {"properties": ["a"]},
        {"items": "any"},
    ],
)
def test_keywords_that_no_schema_has_say_nothing(keywords):
    parameter = Parameter("p", "", kind="array", schema={"items": {"type": "object", **keywords}})
    assert read_value(parameter, '[{"a": 1}]') == [{"a": 1}]


def test_parameters_become_json_schema():
    assert TODOS.json_schema() == {"type": "array", "description": "items", "items": TODOS.schema["items"]}
    tool = ToolSchema(
        "set", "Set.", (Parameter("on", "state", kind="boolean"), Parameter("to", "", enum=("x",)))
    )
    assert tool.function_schema() == {
        "type": "function",
        "function": {
            "name": "set",
            "description": "Set.",
            "parameters": {
                "type": "object",
                "properties": {
                    "on": {"type": "boolean", "description": "state"},
                    "to": {"type": "string", "description": "", "enum": ["x"]},
                },
                "required": ["on", "to"],
                "additionalProperties": False,
            },
        },
    }


def test_the_words_about_tools_name_kinds_and_values():
    text = TYPED_XML.announce(TYPED_TOOLS)[0]
    assert '- todos: what is to be done (a JSON array of schema {"items": {"type": "object"}})' in text
    assert "- merge: keep the others (true or false) (optional)" in text
    assert "- mode: how (one of: fast, slow) (optional)" in text
    assert "- path: file\n" in text
