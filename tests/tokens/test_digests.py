"""Constants on which trained models depend: tags, frames and digests of the harness's own tools."""

from blake3 import blake3

from etude.agent import core_registry
from etude.records import ToolCall
from etude.tokens import CHATML_TEMPLATE, ETUDE_TEMPLATE, Renderer, train_tokenizer
from etude.tokens.grammar import Parameter, XmlGrammar
from etude.tokens.pieces import spell

TOOLS = [
    "list_dir",
    "grep",
    "read_file",
    "edit_lines",
    "search_replace",
    "run_tests",
    "run_command",
    "finish",
]
PARAMETERS = ["path", "pattern", "offset", "limit", "start", "end", "text", "old", "new", "command"]
CONTROLS = [
    *ETUDE_TEMPLATE.control_tokens,
    *(tag for name in [*TOOLS, *PARAMETERS] for tag in (f"<{name}>", f"</{name}>")),
]


def core_renderer():
    grammar = XmlGrammar(core_registry().schemas)
    return Renderer(train_tokenizer([], 256 + len(CONTROLS), CONTROLS), grammar)


def test_the_core_tools_have_the_tags_and_the_digest_that_they_always_had():
    renderer = core_renderer()
    assert [*ETUDE_TEMPLATE.control_tokens, *renderer.grammar.control_tokens()] == CONTROLS
    assert renderer.template_digest == "9e2df1e2d967b3c508e38c38b8d97cca5bd199e607572d1355c49fe5a029dfe0"
    assert core_registry().digest == "13a8c0606d40ea8cd2fc10ae013d85152d0384d6cf02147d2a4f3fdea3df2194"


def test_the_core_tools_are_explained_and_called_in_the_words_that_they_always_were():
    renderer = core_renderer()
    words = spell(renderer.describe("", core_registry().schemas))
    assert (
        blake3(words.encode()).hexdigest()
        == "552224127dc37018c6669c6defc54cc4d72b401c33a2c31ee62dc3d1ce35738c"
    )
    message = renderer.message(["Look. ", ToolCall("grep", {"pattern": "x"}), ToolCall("finish")])
    text = "Look. <grep><pattern>x</pattern></grep><finish></finish><|end|>"
    assert renderer.tokenizer.decode(message) == text
    assert len(message) == len("Look. ") + 4 + 1 + 2 + 1


def test_older_parts_are_written_in_digests_as_they_always_were():
    assert repr(Parameter("path", "file")) == (
        "Parameter(name='path', description='file', required=True, kind='string')"
    )
    assert "QWEN" not in repr(CHATML_TEMPLATE) and "\\n<tool_response>\\n" in repr(CHATML_TEMPLATE)
    assert repr(Parameter("p", "", enum=("a",), schema={"minLength": 1})).endswith(
        "kind='string', enum=('a',), schema={'minLength': 1})"
    )


def test_a_session_of_our_own_format_has_the_tokens_that_it_always_had():
    renderer = core_renderer()
    session = [
        renderer.prompt("test_tally fails\nßüß"),
        renderer.message(["Look. ", ToolCall("read_file", {"path": "a.py"}), ToolCall("list_dir")]),
        renderer.observations(["1\tx = '<|end|>'\n", "", "\n two lines"]),
        renderer.user_message("And now\n?"),
        renderer.message([ToolCall("edit_lines", {"path": "a", "start": "1", "end": "2", "text": "\n"})]),
        renderer.results(["ok"]),
        renderer.prompt("again", system="Be brief."),
    ]
    written = b"".join(part.tobytes() for part in session)
    assert blake3(written).hexdigest() == "bc4ed58bc69a666c605f91c05f79548ce6288c4ade0ed763544784bec8d27ef9"
