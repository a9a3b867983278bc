"""`etude pretrain` end to end, on a model so small that it takes a second."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config import RunConfig, parse_config
from etude.controller.pretraining import check_pretraining, pretrain
from etude.errors import ConfigError
from etude.model.huggingface import load_draft_layers
from etude.observe import RecordingObserver, RunDirectory, SilentObserver, read_metrics
from etude.tokens.tokenizer import Tokenizer
from etude.training import load_checkpoint

TEXTS = [
    f"def add_{number}(left, right):\n    total = left + {number}\n    return total + right\n"
    for number in range(60)
]
MODEL = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "num_experts": 2,
    "experts_per_token": 1,
    "expert_size": 16,
    "max_positions": 64,
}


def _config(directory: Path, **changes: Any) -> RunConfig:
    for name, texts in (("sums", TEXTS[:40]), ("more", TEXTS[40:])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path = directory / f"{name}.jsonl"
        if not path.exists():
            path.write_text(rows, encoding="utf-8")
    sources = {
        name: {"path": str(directory / f"{name}.jsonl"), "heldout_share": 0.1} for name in ("sums", "more")
    }
    section = {
        "sources": sources,
        "cache": str(directory / "cache"),
        "num_steps": 16,
        "tokens_per_step": 256,
        "heldout_every_steps": 8,
        "pool_tokens": 512,
    }
    return parse_config(
        {
            "name": "small",
            "runs_directory": str(directory / "runs"),
            "num_threads": 1,
            "tokenizer": {"vocab_size": 400},
            "model": MODEL,
            "agent": {"max_tokens": 64, "max_message_tokens": 16},
            "checkpoint": {"every_s": 0.001},
            "pretrain": section | changes,
        }
    )


def _run(config: RunConfig, resume: bool = False) -> tuple[RunDirectory, dict[str, Any]]:
    path = Path(config.runs_directory) / config.name
    run = RunDirectory.open(path) if resume else RunDirectory.create(config)
    return run, pretrain(config, run, SilentObserver(), resume)


def test_the_held_out_loss_of_every_source_falls_and_everything_is_accounted_for(tmp_path: Path) -> None:
    run, report = _run(_config(tmp_path, fim_rate=0.5, drafts={"num_layers": 1}))
    for name in ("sums", "more"):
        assert report["heldout_after"][name]["loss"] < report["heldout_before"][name]["loss"]
        assert report["heldout_after"][name]["middle_loss"] < report["heldout_before"][name]["middle_loss"]
        account = report["sources"][name]
        assert sum(account["times_seen"].values()) == account["documents"]
        assert len(report["acceptance"][name]) == 1
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "heldout"]
    assert [(row["step"], row["name"]) for row in rows] == [
        (step, name) for step in (0, 8, 16) for name in ("sums", "more")
    ]
    final = run.checkpoints / "final"
    assert Tokenizer.load(final).vocab_size == load_checkpoint(final)[0].vocab_size
    drafts = load_draft_layers(final)
    assert drafts is not None and len(drafts.layers) == 1


@pytest.mark.slow
def test_continuing_from_a_checkpoint_uses_its_tokenizer_and_draft_layers(tmp_path: Path) -> None:
    first, before = _run(_config(tmp_path, drafts={"num_layers": 1}))
    config = _config(tmp_path, drafts={"num_layers": 1, "only": True}, num_steps=8).model_copy(
        update={"name": "second", "initial_checkpoint": str(first.checkpoints / "final")}
    )
    second, report = _run(config)
    old, new = (load_checkpoint(run.checkpoints / "final")[0] for run in (first, second))
    for name, weight in old.state_dict().items():
        assert torch.equal(weight, new.state_dict()[name]), name
    assert report["heldout_before"] == before["heldout_after"], "the same texts, held out by content"
    for name, depths in report["acceptance"].items():
        assert depths[0]["loss"] < before["acceptance"][name][0]["loss"], "the layers went on learning"


def test_a_stage_lengthens_the_window_and_the_checkpoint_keeps_it(tmp_path: Path) -> None:
    stages = {"long": {"from_step": 8, "window": 128}}
    run, report = _run(_config(tmp_path, stages=stages))
    stored = load_checkpoint(run.checkpoints / "final")[0].config
    assert report["window"] == stored.max_positions == 128
    assert (stored.rope_factor, stored.rope_original_positions) == (2.0, 64)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [{}, {"long": {"from_step": 8, "window": 96, "rope": "base"}}])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, stages: dict[str, Any]) -> None:
    changes = {"num_steps": 40, "fim_rate": 0.5, "stages": stages, "drafts": {"num_layers": 1}}
    straight, wanted = _run(_config(tmp_path, **changes))
    config = _config(tmp_path, **changes).model_copy(update={"name": "killed"})
    _kill_once_saved(config)
    killed, report = _run(config, resume=True)
    assert killed.read_json(killed.report_file)["complete"]
    models = [load_checkpoint(run.checkpoints / "final")[0] for run in (straight, killed)]
    for name, weight in models[0].state_dict().items():
        assert torch.equal(weight, models[1].state_dict()[name]), name
    assert report["sources"] == wanted["sources"]
    assert report["heldout_after"] == wanted["heldout_after"]
    steps = [row["step"] for row in read_metrics(killed.metrics_file) if row["kind"] == "pretrain"]
    assert steps == [10, 20, 30, 40]


def _kill_once_saved(config: RunConfig) -> None:
    """Starts the run in another process and ends it, not asking, when it has a checkpoint."""
    run = RunDirectory.create(config)
    code = (
        "import sys; from pathlib import Path; from etude.config import load_config;"
        "from etude.controller.pretraining import pretrain;"
        "from etude.observe import RunDirectory, SilentObserver;"
        "from tests.controller.running import die_when;"
        "run = RunDirectory(Path(sys.argv[1])); die_when((run.checkpoints / 'latest').exists);"
        "pretrain(run.config, run, SilentObserver(), False)"
    )
    command, root = [sys.executable, "-c", code, str(run.path)], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, start_new_session=True, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert (run.checkpoints / "latest").exists()
    assert not (run.checkpoints / "final").exists(), "it was killed on the way"


def test_a_finished_run_gives_its_report_again(tmp_path: Path) -> None:
    config = _config(tmp_path, num_steps=2)
    run, report = _run(config)
    observer = RecordingObserver()
    again = pretrain(config, run, observer, True)
    assert {**report, "complete": True} == again
    assert observer.lines == ["the run has already finished"]


def test_sources_that_run_out_end_the_run_early(tmp_path: Path) -> None:
    config = _config(tmp_path, num_steps=500)
    sources = {
        name: source.model_copy(update={"max_epochs": 1}) for name, source in config.pretrain.sources.items()
    }
    config = config.model_copy(update={"pretrain": config.pretrain.model_copy(update={"sources": sources})})
    _, report = _run(config)
    assert report["exhausted"]
    assert report["steps"] < 500
    assert all(set(account["times_seen"]) == {"1"} for account in report["sources"].values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {}}, "sources: is empty"),
        ({"sources": {"a": {"path": "/nothing/here"}}}, "no such file"),
    ],
)
def test_what_cannot_begin_is_refused_before_there_is_a_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pretraining(_config(tmp_path, **changes))


def test_weights_that_sum_to_nothing_and_odd_names_are_refused() -> None:
    for sources, message in (
        ({"a": {"path": "x", "weight": 0}}, "weight above 0"),
        ({"a b": {"path": "x"}}, "letters"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config({"pretrain": {"sources": sources}})
