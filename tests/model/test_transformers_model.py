"""transformers' models behind our Model protocol."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from etude.errors import CheckpointError, ConfigError
from etude.model import LanguageModel
from etude.model import transformers_model as module
from etude.model.loading import read_window
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.model.transformers_model import TransformersModel
from tests.model.transformers_builders import tiny_model


def sequences() -> list[np.ndarray]:
    return [
        np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
        for seed, length in enumerate((60, 13, 33, 55, 12, 59))
    ]


def score(model: TransformersModel, given: list[np.ndarray]) -> list[np.ndarray]:
    return score_sequences(cast(LanguageModel, model), given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("group_tokens", [8192, 50])
def test_packed_sequences_do_not_see_each_other(
    kind: str, group_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_GROUP_TOKENS", group_tokens)
    model = tiny_model(kind)
    packed = score(model, sequences())
    for given, together in zip(sequences(), packed, strict=True):
        ids = torch.from_numpy(given.astype(np.int64))[None]
        with torch.no_grad():
            scores = cast(Any, model.inner)(input_ids=ids).logits[0].float().log_softmax(-1)
        alone = scores[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(together[1:], alone, atol=2e-5)


def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    model = tiny_model("glm4_moe", 1)
    model.save(tmp_path)
    loaded = TransformersModel.load(tmp_path)
    assert loaded.vocab_size == 256 and loaded.max_positions == 1024
    for ours, theirs in zip(score(model, sequences()), score(loaded, sequences()), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_step_of_the_policy_gradient_moves_log_probabilities_the_right_way() -> None:
    model = tiny_model("glm4_moe", 1)
    given = sequences()
    before = score(model, given)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
    batch = PackedSequences.pack(given)
    targets = torch.tensor([start + 1 for start in batch.starts])
    advantages = torch.tensor([1.0, -1.0] * 3)
    chosen, _ = packed_logprobs(cast(LanguageModel, model), batch, targets)
    (-(chosen * advantages).sum()).backward()
    optimiser.step()
    after = score(model, given)
    for place, index in enumerate(batch.order):
        change = float(after[index][1] - before[index][1])
        assert change * float(advantages[place]) > 0


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    model = tiny_model("glm4_moe", 1)
    model.save(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError):
        TransformersModel.load(tmp_path)
    with pytest.raises(CheckpointError):
        TransformersModel.load(tmp_path / "nothing")


def test_missing_and_infinite_tensors_are_refused(tmp_path: Path) -> None:
    model = tiny_model("glm4_moe", 1)
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] = float("nan")
    model.save(tmp_path / "nan")
    with pytest.raises(CheckpointError, match="not finite"):
        TransformersModel.load(tmp_path / "nan")
    text = (
        (tmp_path / "nan" / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    )
    (tmp_path / "nan" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="missing keys"):
        TransformersModel.load(tmp_path / "nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_position_embeddings", "long"),
        ("hidden_act", 7),
        ("text_config", 1),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ],
)
def test_a_config_that_transformers_cannot_make_sense_of_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    tiny_model("glm4_moe", 1).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        TransformersModel.load(tmp_path)
    with contextlib.suppress(CheckpointError):
        assert read_window(tmp_path) == 1024


def test_what_needs_an_architecture_of_our_own_is_refused() -> None:
    model = tiny_model("glm4_moe", 1)
    ids = torch.arange(4)
    with pytest.raises(ConfigError, match="packed batches"):
        model(ids, ids, cast(Any, object()))
