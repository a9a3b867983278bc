"""Checkpoints: atomic, verified when read, exact to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.training import (
    RlTrainer,
    load_checkpoint,
    save_checkpoint,
)
from etude.training.checkpoints.saving import has_checkpoint
from tests.model.builders import small_model
from tests.training.builders import (
    Rollouts,
    midtrain_config,
    midtrain_documents,
    next_token_trainer,
    rl_config,
    trainer_of,
)

STATE = {"step": 3, "momentum": torch.arange(4.0), "nested": {"name": "x", "values": [1, 2.5, None]}}
FILES = ["config.json", "digests.json", "model.safetensors", "state.pt"]


def _assert_same(a: LanguageModel, b: LanguageModel) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_model_and_state_come_back_as_they_were(tmp_path: Path) -> None:
    model = small_model(1)
    save_checkpoint(tmp_path / "a", model, STATE)
    save_checkpoint(tmp_path / "b", model)
    loaded, state = load_checkpoint(tmp_path / "a")
    assert state is not None
    assert torch.equal(state.pop("momentum"), STATE["momentum"])  # type: ignore[arg-type]
    assert state == {name: value for name, value in STATE.items() if name != "momentum"}
    _assert_same(loaded, model)
    assert loaded.config == model.config
    assert load_checkpoint(tmp_path / "b")[1] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "nothing half-written stays"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_to_any_file_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    directory = tmp_path / "c"
    save_checkpoint(directory, small_model(1), STATE)
    file = directory / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory)
    assert caught.value.field == "checkpoint"
    assert caught.value.fix


def test_nothing_there_is_refused_by_name(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_checkpoint(tmp_path / "none")


def test_a_save_killed_while_writing_leaves_the_older_one(tmp_path: Path) -> None:
    directory = tmp_path / "latest"
    save_checkpoint(directory, small_model(1))
    half = tmp_path / ".latest.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (half / "left-over").write_bytes(b"of another save")
    _assert_same(load_checkpoint(directory)[0], small_model(1))
    save_checkpoint(directory, small_model(2))
    _assert_same(load_checkpoint(directory)[0], small_model(2))
    assert not (directory / "left-over").exists()


def test_a_save_killed_between_its_renames_is_recovered(tmp_path: Path) -> None:
    directory = tmp_path / "latest"
    save_checkpoint(directory, small_model(1), STATE)
    directory.rename(tmp_path / ".latest.old")
    assert has_checkpoint(directory)
    _assert_same(load_checkpoint(directory)[0], small_model(1))
    save_checkpoint(directory, small_model(2))
    _assert_same(load_checkpoint(directory)[0], small_model(2))


def test_a_save_killed_after_its_renames_keeps_the_newer_one(tmp_path: Path) -> None:
    directory = tmp_path / "latest"
    save_checkpoint(tmp_path / ".latest.old", small_model(1))
    save_checkpoint(directory, small_model(2))
    save_checkpoint(tmp_path / ".latest.old", small_model(1))
    _assert_same(load_checkpoint(directory)[0], small_model(2))
    save_checkpoint(directory, small_model(3))
    _assert_same(load_checkpoint(directory)[0], small_model(3))
    assert not (tmp_path / ".latest.old").exists()


def test_a_reader_between_the_renames_of_a_save_does_not_hinder_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rename = tmp_path / "latest", Path.rename
    save_checkpoint(directory, small_model(1))
    seen: list[bool] = []

    def rename_before_a_reader(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path == directory and not seen:
            seen.append(has_checkpoint(directory))
        return moved

    monkeypatch.setattr(Path, "rename", rename_before_a_reader)
    save_checkpoint(directory, small_model(2))
    assert seen == [True]
    _assert_same(load_checkpoint(directory)[0], small_model(2))
    assert not (tmp_path / ".latest.old").exists()


def test_a_reader_that_comes_as_a_save_ends_finds_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, old, rename = tmp_path / "latest", tmp_path / ".latest.old", Path.rename
    save_checkpoint(old, small_model(1))
    save_checkpoint(tmp_path / "saved", small_model(2))

    def rename_after_the_save(path: Path, target: Path) -> Path:
        if path == old:
            rename(tmp_path / "saved", directory)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_after_the_save)
    _assert_same(load_checkpoint(directory)[0], small_model(2))


def test_files_of_the_caller_are_part_of_the_whole(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    save_checkpoint(directory, small_model(1), write_more=lambda at: (at / "tokenizer.json").write_text("{}"))
    load_checkpoint(directory)
    (directory / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(directory)


def test_the_ends_of_answers_that_lie_beside_a_model_are_in_its_configuration_too(tmp_path: Path) -> None:
    """Transformers and engines that read config.json alone take a default otherwise."""
    ends = {"eos_token_id": [5, 3], "pad_token_id": 3}

    def write_more(directory: Path) -> None:
        (directory / "generation_config.json").write_text(json.dumps(ends | {"temperature": 0.6}))

    save_checkpoint(tmp_path / "final", small_model(), write_more=write_more)
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert ends.items() <= config.items() and "temperature" not in config
    assert load_checkpoint(tmp_path / "final")[1] is None, "and its hash is of what is there"


def test_a_writer_that_fails_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    save_checkpoint(directory, small_model(1))

    def fail(at: Path) -> None:
        raise OSError(f"no space left for {at.name}")

    with pytest.raises(OSError, match="no space"):
        save_checkpoint(directory, small_model(2), write_more=fail)
    _assert_same(load_checkpoint(directory)[0], small_model(1))


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
@pytest.mark.parametrize("matrix_optimizer", ["adamw", "muon"])
def test_an_rl_run_resumed_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, kl_weight: float, matrix_optimizer: str
) -> None:
    rollouts = Rollouts(small_model(0))
    steps = [[rollouts.group([1.0, 0.0, 1.0]), rollouts.group([0.0, 1.0])] for _ in range(4)]
    config = rl_config(
        {"kl_weight": kl_weight},
        {"matrix_optimizer": matrix_optimizer, "warmup_steps": 3, "decay_share": 0.5},
        num_steps=4,
        updates_per_step=2,
        groups_per_step=2,
    )
    straight = trainer_of(config, rollouts)
    for groups in steps:
        straight.step(groups)
    first = trainer_of(config, rollouts)
    for groups in steps[:2]:
        first.step(groups)
    first.save(tmp_path / "c", {"stage": "rl"})
    resumed = trainer_of(config, rollouts, seed=8)
    resumed.restore(tmp_path / "c")
    assert resumed.version == first.version
    for groups in steps[2:]:
        resumed.step(groups)
    _assert_same(straight.model, resumed.model)
    assert straight.publish() == resumed.publish()


@pytest.mark.parametrize("kind", ["plain", "midtrain", "architecture", "optimizer"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config(), rollouts)
    trainer.step([rollouts.group([1.0, 0.0])])
    directory = tmp_path / "c"
    if kind == "plain":
        save_checkpoint(directory, small_model(3))
    elif kind == "midtrain":
        save_checkpoint(directory, small_model(3), {"trainer": {}})
    elif kind == "architecture":
        RlTrainer(
            small_model(3, num_layers=1), rl_config(), "run", trainer._weights, rollouts.blobs.get
        ).save(directory)
    else:
        trainer_of(rl_config(optimizer={"matrix_optimizer": "muon"}), rollouts, 3).save(directory)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    version, state = trainer.version, str(trainer._optimizer.state_dict())
    with pytest.raises(CheckpointError):
        trainer.restore(directory)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert (trainer.version, str(trainer._optimizer.state_dict())) == (version, state)


def test_midtraining_resumed_from_disk_is_the_uninterrupted_one(tmp_path: Path) -> None:
    documents, config = midtrain_documents(), midtrain_config()
    straight = next_token_trainer(small_model(0), documents, config, 0)
    for _ in range(4):
        straight.step()
    first = next_token_trainer(small_model(0), documents, config, 0)
    for _ in range(2):
        first.step()
    save_checkpoint(tmp_path / "c", first.model, {"trainer": first.state_dict()})
    model, state = load_checkpoint(tmp_path / "c")
    assert state is not None
    resumed = next_token_trainer(model, documents, config, 0)
    resumed.load_state_dict(state["trainer"])
    for _ in range(2):
        resumed.step()
    _assert_same(straight.model, resumed.model)
