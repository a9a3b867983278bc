"""Runs that are refused, and runs that other versions began."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config import RunConfig, dump_config, load_config
from etude.errors import ConfigError, SamplerError, UnknownKeyError
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.cli.commands import etude, stand_in


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, RunDirectory]:
    """A configuration file and a run, both with a key that only some other version knew."""
    config = RunConfig(name="old", runs_directory=str(tmp_path))
    run = RunDirectory.create(config)
    file = tmp_path / "old.toml"
    for path in (run.config_file, file):
        path.write_text(dump_config(config).replace("[rl]\n", '[rl]\nwarm_restarts = "3"\n'))
    return file, run


def resume(monkeypatch: pytest.MonkeyPatch, file: Path, *options: str) -> tuple[int, str, list[RunConfig]]:
    """Exit code, standard error, and the configurations that were gone on with."""
    seen: list[RunConfig] = []

    def train(config: RunConfig, run: RunDirectory, observer: object, resume: bool) -> dict[str, object]:
        assert resume
        seen.append(config)
        raise KeyboardInterrupt

    stand_in(monkeypatch, "etude.controller.train", "train", train)
    result = etude("train", "--config", str(file), "--resume", *options)
    return result.exit_code, " ".join(result.stderr.split()), seen


def test_a_key_that_has_vanished_is_named_with_the_way_on(
    monkeypatch: pytest.MonkeyPatch, begun: tuple[Path, RunDirectory], tmp_path: Path
) -> None:
    file, _ = begun
    code, said, seen = resume(monkeypatch, file)
    assert (code, seen) == (2, [])
    assert "rl.warm_restarts: this version does not know the key" in said
    assert "--drop rl.warm_restarts" in said
    newer = tmp_path / "newer.toml"  # without the key, which the run's own file still has
    newer.write_text(dump_config(RunConfig(name="old", runs_directory=str(tmp_path))))
    code, said, seen = resume(monkeypatch, newer)
    assert (code, seen) == (2, [])
    assert "rl.warm_restarts: the run was started with a key that this version does not know" in said


def test_a_run_goes_on_without_a_key_that_is_dropped(
    monkeypatch: pytest.MonkeyPatch, begun: tuple[Path, RunDirectory]
) -> None:
    file, run = begun
    _, _, seen = resume(monkeypatch, file, "--drop", "rl.warm_restarts")
    assert [config.name for config in seen] == ["old"]
    assert run.config.name == "old", "and every other command reads it again"
    assert 'warm_restarts = "3"' in (run.path / "config-before.toml").read_text()
    (row,) = read_metrics(run.metrics_file)
    assert (row["kind"], row["name"], row["value"]) == ("dropped_key", "rl.warm_restarts", "'3'")
    _, _, seen = resume(monkeypatch, file, "--drop", "rl.warm_restarts")
    assert len(seen) == 1, "the file that was given still has it"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--drop", "rl.num_steps"), "rl.num_steps: is still a valid key"),
        (("--drop", "rl.other"), "--drop rl.warm_restarts"),
    ],
)
def test_only_what_is_not_known_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
    begun: tuple[Path, RunDirectory],
    options: tuple[str, ...],
    expected: str,
) -> None:
    file, run = begun
    before = run.config_file.read_text()
    code, said, seen = resume(monkeypatch, file, *options)
    assert (code, seen) == (2, [])
    assert expected in said
    assert run.config_file.read_text() == before


def test_a_new_run_drops_nothing(begun: tuple[Path, RunDirectory]) -> None:
    result = etude("train", "--config", str(begun[0]), "--drop", "rl.warm_restarts")
    assert result.exit_code == 2
    assert "is only valid with --resume" in result.stderr


def test_a_run_that_is_refused_before_anything_came_of_it_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f'name = "a"\nruns_directory = "{tmp_path / "runs"}"\n')

    def refuse(config: RunConfig, run: RunDirectory, observer: object, resume: bool) -> None:
        with run.lock():
            run.metrics_file.touch()
            if config.seed:
                (run.checkpoints / "latest").mkdir()
                (run.checkpoints / "latest" / "state.pt").touch()
        raise ConfigError("the data says no", field="rl")

    stand_in(monkeypatch, "etude.controller.train", "train", refuse)
    assert etude("train", "--config", str(file)).exit_code == 2
    assert not (tmp_path / "runs" / "a").exists()
    assert etude("train", "--config", str(file), "--seed", "1").exit_code == 2
    assert (tmp_path / "runs" / "a").exists(), "something had come of it"


def test_a_run_that_fails_keeps_what_it_wrote(tmp_path: Path) -> None:
    run = RunDirectory.create(RunConfig(name="a", runs_directory=str(tmp_path)))
    run.metrics_file.write_text('{"kind": "rl", "step": 1}\n')
    with pytest.raises(SamplerError), run.removed_if_refused():
        raise SamplerError("the engine failed")
    assert run.path.exists()


def test_asking_for_another_model_than_the_checkpoint_has_is_refused(tmp_path: Path) -> None:
    overrides = [f'initial_checkpoint="{tmp_path}"', "model.hidden_size=64"]
    with pytest.raises(ConfigError, match=r"model\.hidden_size: has no effect.*received '64'"):
        load_config(None, overrides)
    assert load_config(None, overrides[1:]).model.hidden_size == 64
    result = etude("plan", "configs/quickstart.toml", "--set", overrides[0], "--set", overrides[1])
    assert result.exit_code == 2
    assert "has no effect" in result.stderr


def test_unknown_keys_are_errors_of_their_own() -> None:
    with pytest.raises(UnknownKeyError, match="did you mean num_steps"):
        load_config(None, ["rl.num_stesp=3"])


@pytest.mark.parametrize("item", ["../evil=x", "a.b=x", "a=", "=x", "name"])
def test_a_source_has_a_plain_name_and_a_path(item: str) -> None:
    result = etude("sft", "--data", item)
    assert result.exit_code == 2
    assert "--data" in result.stderr and "NAME=PATH" in " ".join(result.stderr.split())


def test_help_names_no_file_of_another_stage() -> None:
    assert "pretraining.toml" not in etude("sft", "--help").output
