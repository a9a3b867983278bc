"""Tokenizers from GGUF metadata cut text as their models learned it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etude.errors import ConfigError
from etude.tokens import Tokenizer
from etude.tokens.gguf_tokenizer import tokenizer_files

_CHARACTERS = [chr(code) for code in [*range(0x21, 0x7F)]] + ["Ġ", "Ċ"]
_MERGES = ["Ġ Ġ", "1 2", "12 3", "Ġ x", "' s", "x s"]


def metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary of single characters and a few merges, the last two tokens control tokens."""
    merged = ["".join(pair.split(" ")) for pair in _MERGES]
    tokens = [*_CHARACTERS, *merged, "<s>", "</s>"]
    given = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": _MERGES,
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (given | changes).items() if value is not None}


def pieces(text: str, cut: str) -> list[str]:
    """The tokens of `text`."""
    given = metadata(pre=cut)
    tokenizer = Tokenizer(tokenizer_files(given)["tokenizer.json"])
    return [tokenizer.decode([index]) for index in tokenizer.encode(text).tolist()]


@pytest.mark.parametrize(
    ("cut", "text", "expected"),
    [
        ("gpt-2", "x 123", ["x", " ", "123"]),
        ("gpt-2", "x  x", ["x", " ", " x"]),
        ("smollm", "x 123", ["x", " ", "1", "2", "3"]),
        ("gpt-2", "x  1", ["x", " ", " ", "1"]),
        ("smollm", "x  1", ["x", "  ", "1"]),  # digits are cut off first, and leave the spaces together
        ("llama-bpe", "1231", ["123", "1"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("llama-bpe", "X'S", ["X", "'", "S"]),
    ],
)
def test_text_is_cut_as_the_model_learned_it(cut: str, text: str, expected: list[str]) -> None:
    assert pieces(text, cut) == expected


def test_control_tokens_template_and_ends_are_kept() -> None:
    files = tokenizer_files(
        metadata(eot_token_id=3, add_bos_token=True) | {"tokenizer.chat_template": "{{ messages }}"}
    )
    tokenizer = Tokenizer(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]))
    assert tokenizer.control_tokens == ("<s>", "</s>")
    assert len(tokenizer.encode("<s>")) == 3  # text is no control token
    ids = metadata()
    generation = json.loads(files["generation_config.json"])
    assert generation["eos_token_id"] == [3, ids["tokenizer.ggml.eos_token_id"]]
    assert files["chat_template.jinja"] == "{{ messages }}"


def test_transformers_reads_the_files_and_begins_with_the_same_token(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    for begins in (True, False):
        directory = tmp_path / str(begins)
        directory.mkdir()
        given = metadata(add_bos_token=begins)
        for name, text in tokenizer_files(given | {"tokenizer.chat_template": "{{ bos_token }}"}).items():
            (directory / name).write_text(text)
        theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        ours = Tokenizer.load(directory)
        begin = [given["tokenizer.ggml.bos_token_id"]] if begins else []
        assert theirs("x  12 x")["input_ids"] == [*begin, *ours.encode("x  12 x").tolist()]
        assert theirs.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "<s>"
        assert theirs.eos_token == "</s>"


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"model": "llama"}, "tokenizer.ggml.model"), ({"pre": "klingon"}, "tokenizer.ggml.pre"),
     ({"merges": None}, "tokenizer.ggml.model")],
)  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tokenizer_files(metadata(**changes))
    assert caught.value.field == field and caught.value.received and caught.value.fix
