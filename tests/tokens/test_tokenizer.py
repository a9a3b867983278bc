import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_builders import CODE, TEXTS, foreign_tokenizer, small_tokenizer
from transformers import AutoTokenizer

from etude.errors import ConfigError
from etude.tokens import Control, Tokenizer, train_tokenizer


@given(st.text())
def test_decoding_gives_back_any_text(text):
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.binary())
def test_decoding_gives_back_any_bytes(data):
    tokenizer = small_tokenizer()
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_lone_surrogates_do_not_break_encoding():
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    assert tokenizer.decode_bytes(tokenizer.encode("a\udcffb")) == b"a\xffb"


names = st.sampled_from(small_tokenizer().control_tokens)


@given(st.lists(st.one_of(names, st.text(max_size=4)), max_size=8))
def test_text_never_becomes_a_control_token(parts):
    tokenizer = small_tokenizer()
    text = "".join(parts)
    pieces = tokenizer.pieces(tokenizer.encode(text))
    assert not any(isinstance(piece, Control) for piece in pieces)
    assert "".join(str(piece) for piece in pieces) == text


def test_pieces_alternate_text_and_control_tokens():
    tokenizer = small_tokenizer()
    ids = [
        tokenizer.control_id("<path>"),
        *tokenizer.encode("lib/é.py").tolist(),
        tokenizer.control_id("</path>"),
    ]
    assert tokenizer.pieces(ids) == [Control("<path>"), "lib/é.py", Control("</path>")]
    assert tokenizer.decode(ids) == "<path>lib/é.py</path>"
    assert tokenizer.decode(ids, skip_control=True) == "lib/é.py"


def test_batches_encode_like_single_texts():
    tokenizer = small_tokenizer()
    for one, text in zip(tokenizer.encode_batch(TEXTS), TEXTS, strict=True):
        assert np.array_equal(one, tokenizer.encode(text))


def test_each_digit_is_a_token_and_paths_and_indents_are_short():
    tokenizer = small_tokenizer()

    def spelled(text):
        return [tokenizer.decode([index]) for index in tokenizer.encode(text).tolist()]

    assert spelled("1234") == ["1", "2", "3", "4"]
    assert spelled("lib/tally.py") == ["lib/", "tally", ".py"]
    assert spelled("\n    return total") == ["\n    ", "return", " total"]
    assert spelled("test_tally") == ["test_", "tally"]


@pytest.mark.slow
def test_training_twice_gives_equal_tokenizers_in_another_process_too():
    again = train_tokenizer(TEXTS * 4, 400, small_tokenizer().control_tokens)
    assert again.digest == train_tokenizer(TEXTS * 4, 400, small_tokenizer().control_tokens).digest
    code = (
        "from token_builders import TEXTS; from etude.tokens import train_tokenizer as t;"
        f"print(t(TEXTS * 4, 400, {small_tokenizer().control_tokens!r}).digest)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert output.stdout.decode().strip() == again.digest


def test_training_keeps_to_the_vocabulary_size():
    assert small_tokenizer().vocab_size <= 420
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(TEXTS, 100, ["<|end|>"])


def test_rendered_sessions_train_like_their_plain_parts():
    names = ["<|end|>", "<path>"]
    rendered = train_tokenizer(["def f<path>return 1<|end|>return 1"] * 3, 300, names)
    plain = train_tokenizer(["def f", "return 1", "return 1"] * 3, 300, names)
    assert rendered.digest == plain.digest


def test_saved_tokenizers_load_here_and_in_transformers(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.digest == tokenizer.digest
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(CODE) == tokenizer.encode(CODE).tolist()
    assert theirs.decode(theirs.encode(CODE)) == CODE
    assert theirs.convert_tokens_to_ids("<path>") == tokenizer.control_id("<path>")
    assert theirs.eos_token == "<|end|>" and theirs.pad_token == "<|pad|>"


def test_pickled_tokenizers_are_equal():
    assert pickle.loads(pickle.dumps(small_tokenizer())).digest == small_tokenizer().digest


def test_added_control_tokens_leave_text_as_it_was():
    before = foreign_tokenizer()
    after = before.with_control_tokens(["<zap>", "</zap>"])
    assert after.vocab_size == before.vocab_size + 2
    assert np.array_equal(after.encode(CODE), before.encode(CODE))
    assert after.control_id("</zap>") == before.vocab_size + 1
    assert after.control_id("</zap>") not in after.encode("</zap>")


def test_unknown_control_tokens_and_foreign_tokenizers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such control token"):
        small_tokenizer().control_id("<zap>")
    with pytest.raises(ConfigError, match="no such file"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="byte-level"):
        Tokenizer('{"model": {"type": "Unigram"}, "decoder": {"type": "Metaspace"}}')


def test_added_tokens_that_are_not_special_decode_as_text_and_are_never_encoded():
    definition = json.loads(small_tokenizer()._definition)
    size = small_tokenizer().vocab_size
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    definition["added_tokens"].append({"id": size, "content": "<think>", **flags})
    definition["normalizer"] = {"type": "NFC"}
    tokenizer = Tokenizer(json.dumps(definition))
    assert tokenizer.pieces([size]) == ["<think>"]
    assert tokenizer.control_id("<think>") == size
    assert size not in tokenizer.encode("<think>")
    decomposed = "e\u0301"
    assert tokenizer.decode(tokenizer.encode(decomposed)) == decomposed


def test_ids_that_pad_a_models_vocabulary_beyond_the_tokenizers_stand_for_no_bytes():
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("a b").tolist()
    ids[1:1] = [tokenizer.vocab_size, tokenizer.vocab_size + 300]
    assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids), skip_control=True) == "a b"
    assert tokenizer.pieces(ids) == ["a b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"model"', "not JSON"),
        ("tokenizer.json", b"[]", "not a JSON object"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}', "cannot be read"),
        ("tokenizer_config.json", b'{"eos_', "not JSON"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, name, content, message):
    small_tokenizer().save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert name in (caught.value.fix or "")
