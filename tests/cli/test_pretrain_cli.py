"""`etude pretrain`, `sft` and `tokenizer` at the command line: short forms, mistakes, a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli.app import app
from etude.cli.pretrain import merge
from etude.config import load_config
from etude.errors import ConfigError
from etude.tokens.tokenizer import Tokenizer

TEXTS = [f"def add_{number}(left, right):\n    return left + right + {number}\n" for number in range(50)]


def test_short_forms_win_over_overrides() -> None:
    settings = merge(
        "pretrain", ["pretrain.sources.a.path=x", "name=y"], ["a=b c/d"], Path("model"), "run", 2
    )
    config = load_config(None, settings)
    assert config.pretrain.sources["a"].path == "b c/d"
    assert (config.name, config.initial_checkpoint) == ("run", "model")
    assert config.pretrain.drafts.num_layers == 2


@pytest.mark.parametrize("item", ["path/only", "=path"])
def test_a_source_needs_a_name(item: str) -> None:
    with pytest.raises(ConfigError, match="--data NAME=PATH"):
        merge("sft", None, [item], None, None, None)


def test_a_tokenizer_is_trained_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS), encoding="utf-8")
    command = ["tokenizer", "train", "--data", str(path), "--column", "body", "--vocab-size", "400"]
    command += ["--out", str(tmp_path / "made")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    tokenizer = Tokenizer.load(tmp_path / "made")
    assert 300 < tokenizer.vocab_size <= 400
    assert tokenizer.has_control("<|fim_middle|>")
    assert CliRunner().invoke(app, command).exit_code == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["pretrain"], "sources: is empty"),
        (["pretrain", "--data", "a=/nothing/here"], "no such file or directory"),
        (["sft", "--data", "a=/nothing/here"], "initial_checkpoint"),
        (["sft", "--data", "a=/nothing/here", "--from", "runs/x/checkpoints/final"], "train the run 'x'"),
        (["pretrain", "--resume"], "there is no run to resume"),
        (["pretrain", "--data", "a=x", "--set", "pretrain.sources.a.wieght=1"], "did you mean weight?"),
    ],
)
def test_mistakes_are_told_before_there_is_a_run(tmp_path: Path, command: list[str], words: str) -> None:
    result = CliRunner().invoke(app, [*command, "--set", f"runs_directory={tmp_path / 'runs'}"])
    assert result.exit_code == 2
    assert words in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["pretrain", "sft"])
def test_a_run_that_nothing_names_has_the_command_s_name(tmp_path: Path, command: str) -> None:
    named = tmp_path / "named.toml"
    named.write_text('name = "own"\n', encoding="utf-8")
    line = [command, "--resume", "--set", f"runs_directory={tmp_path / 'runs'}"]
    for more, name in (([], command), (["--config", str(named)], "own"), (["--name", "mine"], "mine")):
        result = CliRunner().invoke(app, [*line, *more])
        assert result.exit_code == 2
        assert f"runs/{name}" in "".join(result.output.split())
