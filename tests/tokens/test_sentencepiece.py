"""Tokenizers as SentencePiece makes them: what text becomes, and whether others give the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.tokens.sentencepiece_models import (
    METASPACE,
    REPLACE,
    inst_tokenizer,
    spm_tokenizer,
    swallowing_tokenizer,
    turns_tokenizer,
    words_tokenizer,
)
from tests.tokens.token_builders import TYPED_TOOLS

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens import Control, MessageStream, Tokenizer
from etude.tokens.chat.histories import ChatFrames
from etude.tokens.chat.messages import Opening
from etude.tokens.chat.openai_chat import read_messages
from etude.tokens.chat_format import choose_format
from etude.tokens.gguf_tokenizer import tokenizer_files
from etude.tokens.grammar import collect

LLAMA, MISTRAL, GEMMA = spm_tokenizer(), spm_tokenizer(normalizer=None, cutter=METASPACE), turns_tokenizer()
ALWAYS = spm_tokenizer(normalizer=None, cutter={**METASPACE, "prepend_scheme": "always"})
KINDS = [LLAMA, MISTRAL, GEMMA, ALWAYS]
TALK = [
    {"role": "user", "content": "Fix lib/tally.py"},
    {"role": "assistant", "content": "def tally(xs):\n    return total"},
    {"role": "user", "content": "now ß 漢 🙂\n\nand now?"},
]
SYSTEM = {"role": "system", "content": "You are a coding agent."}


@given(st.text(alphabet="ab \n\t<>/s▁é漢🙂tal"))
def test_any_text_is_given_back_and_no_part_of_it_is_a_control_token(text: str) -> None:
    for tokenizer in KINDS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not np.isin(ids, [tokenizer.control_id(name) for name in tokenizer.control_tokens]).any()


@given(st.binary(max_size=20))
def test_any_bytes_are_given_back(data: bytes) -> None:
    assert LLAMA.decode_bytes(LLAMA.encode(data)) == data


@given(st.text(alphabet="ab \n\té漢🙂tal<0xA>", min_size=1))
def test_text_has_the_tokens_that_the_library_gives_at_the_start_and_behind_a_control_token(
    text: str,
) -> None:
    for tokenizer in KINDS:
        theirs = tokenizers.Tokenizer.from_str(tokenizer._definition)
        end = tokenizer.control_id("</s>")
        assert tokenizer.encode(tokenizer.lead(text)).tolist() == theirs.encode(text).ids
        behind = tokenizer.encode(tokenizer.lead(text, Control("</s>"))).tolist()
        assert [end, *behind] == theirs.encode(f"</s>{text}").ids


def test_batches_encode_like_single_texts() -> None:
    texts = ["def tally", "▁a b", " x"]
    for tokenizer in KINDS:
        for one, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
            assert np.array_equal(one, tokenizer.encode(text))


def test_words_that_the_vocabulary_cuts_off_whole_are_text_and_other_added_tokens_are_not() -> None:
    tokenizer = spm_tokenizer(words=("<h1>", "<tool_call>"), normalizer=REPLACE)
    theirs = tokenizers.Tokenizer.from_str(tokenizer._definition)
    assert tokenizer.encode("a<h1>b").tolist() == theirs.encode("a<h1>b").ids
    assert tokenizer.added_tokens == ("<unk>", "<s>", "</s>", "<tool_call>")
    assert tokenizer.control_id("<tool_call>") not in tokenizer.encode("<tool_call>")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer"),
        ({"byte_fallback": False}, "model"),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused(changes: dict[str, Any], field: str) -> None:
    parsed = json.loads(LLAMA._definition)
    parsed |= {name: value for name, value in changes.items() if name in parsed}
    parsed["model"] |= {name: value for name, value in changes.items() if name in parsed["model"]}
    with pytest.raises(ConfigError) as caught:
        Tokenizer(json.dumps(parsed))
    assert field in (caught.value.field or "") and caught.value.received is not None and caught.value.fix


def _judge(tokenizer: Tokenizer, directory: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer.save(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _serve(tokenizer: Tokenizer, talk: list[dict[str, str]], **options: Any) -> list[int]:
    words, rest = read_messages(talk)
    frames = ChatFrames(choose_format(tokenizer, **options).renderers())
    return frames.prompt([Opening(words), *rest], "").tokens.tolist()


@pytest.mark.parametrize(
    "make",
    [turns_tokenizer, inst_tokenizer, words_tokenizer, swallowing_tokenizer],
    ids=lambda make: make.__name__,
)
def test_frames_of_published_kinds_give_the_tokens_that_transformers_gives(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = make()
    theirs = _judge(tokenizer, tmp_path / "official")
    kept = _judge(choose_format(tokenizer).tokenizer, tmp_path / "kept")
    for talk in (TALK, TALK[:1], [SYSTEM, *TALK[:1]], [SYSTEM, *TALK]):
        ours = _serve(tokenizer, talk)
        given = {"add_generation_prompt": True, "return_dict": False}
        assert kept.apply_chat_template(talk, **given) == ours
        if make is not inst_tokenizer or len(talk) < 4:  # there the system's words move to the last message
            assert theirs.apply_chat_template(talk, **given) == ours


@pytest.mark.parametrize(
    ("make", "options"),
    [(make, {}) for make in (turns_tokenizer, inst_tokenizer, words_tokenizer, swallowing_tokenizer)]
    + [(spm_tokenizer, {"template": "plain"})],
)
def test_sessions_with_tools_are_what_the_kept_template_renders_and_parse_alike_however_they_are_cut(
    make: Callable[[], Tokenizer], options: dict[str, Any], tmp_path: Path
) -> None:
    chosen = replace(choose_format(make(), **options), tools=TYPED_TOOLS, system="Be brief.")
    renderer, theirs = chosen.renderer(), _judge(chosen.tokenizer, tmp_path)
    call = ToolCall("read_file", {"path": "lib/tally.py", "offset": "3"})
    answer = renderer.message(["I look.", call])
    tokens = [renderer.prompt("Fix it"), answer, renderer.observations(["x = 1", ""])]
    told = {"name": "read_file", "arguments": {"path": "lib/tally.py", "offset": 3}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Fix it"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": told}]},
        {"role": "tool", "content": "x = 1"},
        {"role": "tool", "content": ""},
    ]
    tools = [tool.function_schema() for tool in TYPED_TOOLS]
    rendered = theirs.apply_chat_template(talk, tools=tools, add_generation_prompt=True, return_dict=False)
    assert np.concatenate(tokens).tolist() == rendered
    assert renderer.read(answer).calls == (call,) and renderer.read(answer).text.startswith("I look.")
    for size in (1, 2, 5):
        stream, events = MessageStream(renderer), []
        for start in range(0, len(answer), size):
            events += stream.feed(answer[start : start + size])
        assert collect([*events, *stream.finish()]) == renderer.read(answer)


def test_a_checkpoint_in_the_plain_frame_is_spoken_to_in_it_without_being_told() -> None:
    plain = choose_format(spm_tokenizer(), "plain")
    again = choose_format(plain.tokenizer)
    assert replace(again.template, name="plain") == plain.template and again.grammar == "hermes"
    assert again.tokenizer.chat_template == plain.tokenizer.chat_template


def test_a_model_without_a_frame_is_told_which_one_it_can_learn() -> None:
    with pytest.raises(ConfigError, match="no chat template") as caught:
        choose_format(spm_tokenizer())
    assert '"plain"' in (caught.value.fix or "")


def test_a_gguf_file_gives_the_same_tokenizer_from_scores_alone() -> None:
    parsed = json.loads(LLAMA._definition)
    vocabulary, merges = parsed["model"]["vocab"], parsed["model"]["merges"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    ranks = {"".join(pair): -float(place) for place, pair in reversed([*enumerate(merges)])}
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [ranks.get(token, -1e4) for token in tokens],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    files = tokenizer_files({f"tokenizer.ggml.{name}": value for name, value in metadata.items()})
    theirs = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in ("def tally(xs):\n    return total", " You are", "ß\n</s>", "total total"):
        ours = LLAMA.encode(LLAMA.lead(text)).tolist()
        read = Tokenizer(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]))
        assert read.encode(read.lead(text)).tolist() == ours
        assert text == "ß\n</s>" or theirs.encode(text).ids == [1, *ours]
