"""How `etude serve` opens the model directory that it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.cli.served_model import open_checkpoint
from etude.config import RunConfig
from etude.errors import CheckpointError, ConfigError, UserError, WeightUpdateError
from etude.inference.server.checkpoints import CheckpointWeights, checkpoint_manifest
from etude.model import build_model
from etude.observe import RunDirectory
from etude.records import PolicyVersion
from etude.training.checkpoints import save_checkpoint
from etude.weights import MemoryWeights
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.inference.server.checkpoint import write_checkpoint
from tests.inference.server.serving import xml_model
from tests.model.builders import small_config

AUTO = ("auto", "auto")


def test_a_run_serves_its_last_checkpoint_in_the_grammar_of_its_tokenizer(tmp_path: Path) -> None:
    run = RunDirectory.create(RunConfig(name="tiny", runs_directory=str(tmp_path)))
    tokenizer = xml_model()[0].tokenizer
    model = build_model(small_config(), tokenizer.vocab_size)
    model.initialise(0)
    save_checkpoint(run.checkpoints / "final", model, write_more=tokenizer.save)  # type: ignore[arg-type]
    opened = open_checkpoint(run.path, None, AUTO, None, 64)
    assert (opened.served.name, opened.served.max_context_tokens) == ("tiny", 127)
    assert opened.served.end_tokens == {tokenizer.control_id("<|end|>")}
    assert opened.served.renderers is not None


def test_the_tokens_that_end_an_answer_are_those_of_the_checkpoint_too(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tiny")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1 << 40, "x"]}))
    end = qwen_tokenizer().control_id("<|im_end|>")
    assert open_checkpoint(directory, "n", AUTO, 100, 64).served.end_tokens == {5, end}
    served = open_checkpoint(directory, "n", ("auto", "none"), 100, 64).served
    assert served.end_tokens == {5} and served.renderers is None
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        open_checkpoint(directory, "n", AUTO, 100, 64)
    (directory / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="eos_token_id"):
        open_checkpoint(directory, "n", ("auto", "none"), 100, 64)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_that_lacks_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path / "tiny")
    (directory / name).unlink()
    with pytest.raises(UserError, match=r"config\.json|safetensors|tokenizer"):
        open_checkpoint(directory, None, AUTO, None, 64)


def test_weights_come_from_a_directory_only_if_they_are_what_the_manifest_says(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "next")
    manifest = checkpoint_manifest(directory, PolicyVersion("tiny", 1))
    weights = CheckpointWeights(small_config(max_positions=600), MemoryWeights())
    assert set(weights.fetch(manifest)) == {entry.name for entry in manifest.tensors}
    write_checkpoint(directory, seed=1)
    with pytest.raises(WeightUpdateError, match="differs from the manifest"):
        weights.fetch(manifest)
    other = CheckpointWeights(small_config(max_positions=700), MemoryWeights())
    with pytest.raises(WeightUpdateError, match="another model"):
        other.fetch(manifest)
    (directory / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(WeightUpdateError, match="cannot be used"):
        weights.fetch(manifest)
