import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_builders import GRAMMAR, TEXTS, small_tokenizer, text_renderer, token_renderer

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens import CHATML_TEMPLATE, Control, Renderer, train_tokenizer


def spelled(renderer, tokens):
    return renderer.tokenizer.decode(tokens)


def test_a_session_reads_as_the_template_says():
    renderer = token_renderer()
    call = ToolCall("read_file", {"path": "lib/tally.py"})
    session = np.concatenate(
        [
            renderer.prompt("test_tally fails", system="Be brief."),
            renderer.message([call, ToolCall("finish")]),
            renderer.observations(["1\tx = 1", "ok"]),
        ]
    )
    assert spelled(renderer, session) == (
        "<|system|>Be brief.<|end|><|user|>test_tally fails<|end|><|assistant|>"
        "<read_file><path>lib/tally.py</path></read_file><finish></finish><|end|>"
        "<|tool|><result>1\tx = 1</result><result>ok</result><|end|><|assistant|>"
    )


marks = st.sampled_from(small_tokenizer().control_tokens)


@given(st.lists(st.one_of(marks, st.text(max_size=3)), max_size=5).map("".join))
def test_text_from_outside_adds_no_control_tokens(text):
    renderer = token_renderer()
    control = {renderer.tokenizer.control_id(name) for name in renderer.tokenizer.control_tokens}
    for render in (renderer.prompt, renderer.user_message, lambda text: renderer.observations([text])):
        with_text = [index for index in render(text).tolist() if index in control]
        without = [index for index in render("").tolist() if index in control]
        assert with_text == without


@pytest.mark.parametrize("name", ["|end|", "|user|", "result", "/result", "think"])
def test_the_names_of_a_call_from_outside_add_no_control_tokens(name):
    renderer = token_renderer()
    for call in (ToolCall(name, {"path": "a"}), ToolCall("read_file", {name: "a"})):
        names = {piece.name for piece in renderer.grammar.render_call(call) if isinstance(piece, Control)}
        assert names <= set(renderer.grammar.control_tokens())
        ends = renderer.message([call]).tolist().count(renderer.end_token)
        assert ends == 1
    renderer = token_renderer()
    assert not renderer.text_mode
    assert len(renderer.message([ToolCall("finish")])) == 3


def test_scripted_malformed_text_is_sampled_as_tags():
    renderer = token_renderer()
    tokens = renderer.message(["<read_file><path>lib/tally.py</read_file>"])
    (call,) = renderer.parse(tokens)
    assert call == ToolCall("read_file", {}, "unclosed path")


calls = st.one_of(
    st.builds(
        lambda path, text: ToolCall("edit", {"path": path, "text": text}),
        st.text(max_size=20),
        st.text(max_size=20),
    ),
    st.just(ToolCall("finish")),
)


@given(st.lists(calls, max_size=3))
def test_messages_parse_back_in_both_modes(given_calls):
    renderer = token_renderer()
    assert renderer.parse(renderer.message(given_calls)) == given_calls
    renderer = text_renderer()
    assert renderer.text_mode
    assert renderer.parse(renderer.message(given_calls)) == given_calls


@given(st.lists(st.integers(0, small_tokenizer().vocab_size + 9), max_size=60))
def test_any_tokens_parse(tokens):
    for call in token_renderer().parse(np.array(tokens, dtype=np.int32)):
        assert isinstance(call, ToolCall)


def test_chatml_frames_messages_as_qwen_expects():
    tokenizer = train_tokenizer(TEXTS, 400, CHATML_TEMPLATE.control_tokens)
    renderer = Renderer(tokenizer, GRAMMAR, CHATML_TEMPLATE)
    session = np.concatenate(
        [
            renderer.prompt("Mend it.", system="Be brief."),
            renderer.message([ToolCall("finish")]),
            renderer.observations(["ok"]),
        ]
    )
    assert spelled(renderer, session) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nMend it.<|im_end|>\n"
        "<|im_start|>assistant\n"
        "<finish></finish><|im_end|>\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_tokenizer_with_half_of_the_tags_is_refused():
    tokenizer = small_tokenizer()
    with pytest.raises(ConfigError, match="no such control token"):
        Renderer(tokenizer, GRAMMAR, CHATML_TEMPLATE)
    half = train_tokenizer(TEXTS, 400, [*token_renderer().template.control_tokens, "<edit>", "</edit>"])
    with pytest.raises(ConfigError, match="only some of the tools"):
        Renderer(half, GRAMMAR)


def test_the_digest_names_what_decides_the_tokens():
    assert token_renderer().template_digest == Renderer(token_renderer().tokenizer, GRAMMAR).template_digest
    assert token_renderer().template_digest != text_renderer().template_digest
