"""`etude checkpoint` as a user types it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from etude.cli.app import app
from etude.config import CheckpointConfig, parse_config
from etude.model import LanguageModel
from etude.model.huggingface import load_model
from etude.training.checkpoints import save_checkpoint
from tests.model.reference import our_logits, reference_checkpoint, tokens_of

VARIANTS = ["dense", "moe_tied", "latent"]


def _run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def _source(directory: Path, variant: str) -> Path:
    """What a team brings: weights of transformers' with a tokenizer's files beside them."""
    reference_checkpoint(directory, variant)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_text("{}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [3]}')
    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_comes_in_and_goes_out_with_its_files_and_equal_logits(tmp_path: Path, variant: str) -> None:
    source = _source(tmp_path / "theirs", variant)
    _run("import", source, tmp_path / "ours")
    _run("verify", tmp_path / "ours")
    _run("export", tmp_path / "ours", tmp_path / "out", "--dtype", "float32", "--max-file-gb", "0.00002")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < names
    assert "model.safetensors.index.json" in names
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [3]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    model = load_model(source)
    tokens = tokens_of(24)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0].float()
    torch.testing.assert_close(our_logits(model, tokens), expected, rtol=1e-4, atol=1e-5)


def test_weights_go_out_in_bfloat16_unless_told(tmp_path: Path) -> None:
    source = _source(tmp_path / "theirs", "dense")
    assert "bfloat16" in _run("export", source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    model: LanguageModel = load_model(source)
    stored = load_model(tmp_path / "out", torch.bfloat16)
    assert torch.equal(stored.embedding, model.embedding.bfloat16())


def test_a_run_is_shown_and_its_damage_found(tmp_path: Path) -> None:
    source = _source(tmp_path / "theirs", "dense")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    state = {"stage": "rl", "step": 7, "score": 0.5}
    save_checkpoint(run / "checkpoints" / "latest", load_model(source), state)
    save_checkpoint(run / "checkpoints" / "final", load_model(source))
    rows = json.loads(_run("show", run, "--json"))
    assert [(row["checkpoint"], row["step"], row["resumable"]) for row in rows] == [
        ("final", "", False),
        ("latest", 7, True),
    ]
    assert "latest" in _run("show", run)
    _run("verify", run)
    (run / "checkpoints" / "latest" / "state.pt").write_bytes(b"?")
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(run), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)[1]["state"] == "damaged"


@pytest.mark.parametrize("mistake", ["nothing there", "target exists", "no tokenizer", "damaged"])
def test_mistakes_are_named_and_leave_nothing(tmp_path: Path, mistake: str) -> None:
    source, target = _source(tmp_path / "theirs", "dense"), tmp_path / "out"
    if mistake == "nothing there":
        source = tmp_path / "nothing"
    elif mistake == "target exists":
        target.mkdir()
    elif mistake == "no tokenizer":
        (source / "tokenizer.json").unlink()
    else:
        (source / "config.json").write_text("{")
    result = CliRunner().invoke(app, ["checkpoint", "import", str(source), str(target)])
    assert result.exit_code == 2
    assert "fix" in result.output or "cannot be read" in result.output
    assert not target.exists() or not list(target.iterdir())
    assert not (tmp_path / ".out.partial").exists()


def test_the_settings_of_the_page_are_the_defaults_and_its_commands_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert parse_config(tomllib.loads(blocks["toml"])).checkpoint == CheckpointConfig()
    commands = re.findall(r"^etude checkpoint (\w+)", blocks[""], re.MULTILINE)
    assert sorted(commands) == ["export", "import", "show", "verify"]
    for command in commands:
        _run(command, "--help")
