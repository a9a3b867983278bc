"""`etude checkpoint` as a user types it."""

from __future__ import annotations

import errno
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from etude.cli.app import app
from etude.config import AdapterConfig, CheckpointConfig, parse_config
from etude.config.parallel import ParallelConfig
from etude.model import LanguageModel
from etude.model.huggingface import load_model
from etude.model.lora import Adapters
from etude.training.checkpoints import load_checkpoint, save_checkpoint
from tests.model.reference import our_logits, reference_checkpoint, tokens_of
from tests.training.parallel import storing
from tests.training.parallel.spawning import on_ranks

VARIANTS = ["dense", "moe_tied", "latent"]


def _run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def _words(text: str) -> str:
    """Without the breaks of lines."""
    return " ".join(text.split())


def _source(directory: Path, variant: str) -> Path:
    """What a team brings: weights of transformers' with a tokenizer's files beside them."""
    reference_checkpoint(directory, variant)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_text("{}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [3]}')
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_comes_in_and_goes_out_with_its_files_and_equal_logits(tmp_path: Path, variant: str) -> None:
    source = _source(tmp_path / "theirs", variant)
    _run("export", source, tmp_path / "ours", "--dtype", "float32")
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
    assert "start another run; these checkpoints are intact and can be used: final" in _words(result.stderr)
    save_checkpoint(
        run / "checkpoints" / "history" / "step-6", load_model(source), {"stage": "rl", "step": 6}
    )
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(run)])
    assert "continue with --resume, which uses an intact checkpoint: history/step-6" in _words(result.stderr)
    assert "in a run, --resume" in _words(
        CliRunner().invoke(app, ["checkpoint", "verify", str(run / "checkpoints" / "latest")]).stderr
    )


def test_a_file_that_cannot_be_opened_is_named_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run("export", _source(tmp_path / "theirs", "dense"), tmp_path / "ours")
    weights, opened = tmp_path / "ours" / "model.safetensors", Path.open

    def open_as_others(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == weights:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_as_others)  # root may read what no one may
    assert f"{weights}: Permission denied" in _run("verify", tmp_path / "ours", code=2).replace("\n", "")


def test_a_model_of_others_is_not_said_to_be_damaged_for_want_of_hashes(tmp_path: Path) -> None:
    source = _source(tmp_path / "theirs", "dense")
    words = _words(_run("verify", source, code=2))
    assert "without hashes" in words and "etude model import" in words and "restore" not in words


def test_adapters_go_out_merged_with_the_base_of_their_run(tmp_path: Path) -> None:
    source = _source(tmp_path / "theirs", "dense")
    model = load_model(source)
    adapters = Adapters(model, AdapterConfig(rank=2))
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.add_(0.1)
    state = {"stage": "rl", "step": 3, "adapters": adapters.state()}
    run = tmp_path / "run"
    latest = run / "checkpoints" / "latest"
    save_checkpoint(latest, None, state)
    assert "--base" in _run("export", latest, tmp_path / "out", code=2)
    _run("export", latest, tmp_path / "named", "--dtype", "float32", "--base", source)
    (run / "config.toml").write_text(f'initial_checkpoint = "{source}"\n')
    _run("export", latest, tmp_path / "out", "--dtype", "float32")
    adapters.merge()
    for target in ("out", "named"):
        merged = dict(load_model(tmp_path / target).named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(merged[name], parameter), name
        assert (tmp_path / target / "tokenizer.json").exists()
    other = _source(tmp_path / "other", "moe_tied")
    message = _run("export", latest, tmp_path / "wrong", "--base", other, code=2)
    assert "trained on" in message
    assert not (tmp_path / "wrong").exists()


def test_a_run_that_was_stopped_goes_out_with_the_tokenizer_that_it_began_with(tmp_path: Path) -> None:
    source, run = _source(tmp_path / "theirs", "dense"), tmp_path / "run"
    save_checkpoint(run / "checkpoints" / "latest", load_model(source), {"stage": "sft", "step": 3})
    (run / "config.toml").write_text(f'initial_checkpoint = "{source}"\n')
    _run("export", run, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [3]


def test_what_ranks_have_saved_is_shown_verified_and_exported(tmp_path: Path) -> None:
    on_ranks(storing.save, ParallelConfig(ranks=2, fsdp=2), tmp_path / "c", 1)
    (row,) = json.loads(_run("show", tmp_path / "c", "--json"))
    assert (row["ranks"], row["step"], row["resumable"]) == (2, 1, True)
    _run("verify", tmp_path / "c")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    _run("export", tmp_path / "c", tmp_path / "out", "--dtype", "float32")
    exported = dict(load_model(tmp_path / "out").named_parameters())
    for name, parameter in load_checkpoint(tmp_path / "c")[0].named_parameters():
        assert torch.equal(exported[name], parameter), name
    shard = next((tmp_path / "c" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "damaged" in _run("verify", tmp_path / "c", code=2)
    assert "damaged" in _run("export", tmp_path / "c", tmp_path / "again", code=2)


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
    result = CliRunner().invoke(app, ["checkpoint", "export", str(source), str(target)])
    assert result.exit_code == 2
    assert "fix" in result.output or "cannot be read" in result.output
    assert not target.exists() or not list(target.iterdir())
    assert not (tmp_path / ".out.partial").exists()


def test_the_settings_of_the_page_are_the_defaults_and_its_commands_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert parse_config(tomllib.loads(blocks["toml"])).checkpoint == CheckpointConfig()
    commands = re.findall(r"^etude checkpoint (\w+)", blocks[""], re.MULTILINE)
    assert sorted(commands) == ["export", "show", "verify"]
    for command in commands:
        _run(command, "--help")
