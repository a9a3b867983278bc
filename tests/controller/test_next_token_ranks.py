"""`etude pretrain` and `etude sft` on two ranks: as in one process, the same documents counted, resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config import RunConfig, parse_config
from etude.config.parallel import ParallelConfig
from etude.controller.corpora import session_control_tokens
from etude.controller.mixtures import resolve
from etude.controller.pretraining import pretrain
from etude.controller.sft import fine_tune
from etude.errors import ConfigError
from etude.observe import RunDirectory, SilentObserver
from etude.tokens.training import train_tokenizer
from etude.training import load_checkpoint
from etude.training.checkpoints.shards import num_writers
from tests.controller import test_pretraining as one_process
from tests.controller import test_sft

LOSS_TOLERANCE = 2e-3
"""Nats per held-out token after 16 steps, which lower the loss by more than 0.1."""
LONG_TOLERANCE = 0.02
"""After 60 steps, which lower it by more than 1."""


def _config(directory: Path, name: str, parallel: dict[str, int], **changes: Any) -> RunConfig:
    """Of `tests/controller/test_pretraining.py`, on ranks."""
    plain = one_process._config(directory, **changes).model_dump(mode="json", exclude_unset=True)
    return parse_config(plain | {"name": name, "parallel": parallel})


def _pretrain(config: RunConfig, resume: bool = False) -> tuple[RunDirectory, dict[str, Any]]:
    path = Path(config.runs_directory) / config.name
    run = RunDirectory.open(path) if resume else RunDirectory.create(config)
    return run, pretrain(config, run, SilentObserver(), resume)


def _assert_same_outcome(
    ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = LOSS_TOLERANCE
) -> None:
    assert ours["sources"] == theirs["sources"], "counted exactly"
    assert ours["steps"] == theirs["steps"]
    for name, before in theirs["heldout_before"].items():
        after = theirs["heldout_after"][name]
        assert before["loss"] - after["loss"] > 0.1, "a test of nothing"
        for kind, loss in after.items():
            assert ours["heldout_after"][name][kind] == pytest.approx(loss, abs=tolerance)


def _weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(run.checkpoints / "final")[0].state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ({"ranks": 2, "fsdp": 2}, {"fim_rate": 0.5, "stages": {"long": {"from_step": 8, "window": 128}}}),
        ({"ranks": 2}, {"drafts": {"num_layers": 1}}),
        ({"ranks": 2, "expert": 2}, {"micro_batch_tokens": 128}),
    ],
)
def test_ranks_pretrain_as_one_process_does(
    tmp_path: Path, parallel: dict[str, int], changes: dict[str, Any]
) -> None:
    changes = {"balance_weight": 0.0} | changes  # the balance is one of a micro-batch, and those differ
    _, alone = _pretrain(_config(tmp_path, "alone", {"ranks": 1}, **changes))
    run, together = _pretrain(_config(tmp_path, "together", parallel, **changes))
    _assert_same_outcome(together, alone)
    assert num_writers(run.checkpoints / "latest") == 2
    assert num_writers(run.checkpoints / "final") == 0, "a finished model is a Hugging Face directory"
    assert together.keys() == alone.keys()
    for name, depths in alone.get("acceptance", {}).items():
        assert together["acceptance"][name][0]["loss"] == pytest.approx(depths[0]["loss"], abs=0.02)


@pytest.mark.slow
def test_ranks_fine_tune_as_one_process_does(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(one_process.TEXTS, 400, session_control_tokens())
    reports: list[dict[str, Any]] = []
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        plain = test_sft._config(directory, tokenizer, balance_weight=0.0)
        parallel = ParallelConfig(ranks=ranks, fsdp=ranks)
        config = plain.model_copy(update={"parallel": parallel})
        reports.append(fine_tune(config, RunDirectory.create(config), SilentObserver(), False))
    _assert_same_outcome(reports[1], reports[0])


@pytest.mark.slow
def test_a_killed_run_on_ranks_goes_on_to_the_same_bits_and_alone_to_the_same_documents(
    tmp_path: Path,
) -> None:
    two, changes = {"ranks": 2, "fsdp": 2}, {"num_steps": 60, "fim_rate": 0.5, "balance_weight": 0.0}
    straight, wanted = _pretrain(_config(tmp_path, "straight", two, **changes))
    for name, parallel in (("killed", two), ("alone", {"ranks": 1})):
        config = _config(tmp_path, name, two, **changes)
        _kill_once_saved(config)
        run, report = _pretrain(_config(tmp_path, name, parallel, **changes), resume=True)
        _assert_same_outcome(report, wanted, LONG_TOLERANCE)
        if parallel == two:
            for key, weight in _weights(straight).items():
                assert torch.equal(weight, _weights(run)[key]), key


def _kill_once_saved(config: RunConfig) -> None:
    """Begins the run in another process, and kills it with all of its ranks once it has a checkpoint."""
    run = RunDirectory.create(config)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from etude.controller.pretraining import pretrain\n"
        "from etude.observe import RunDirectory, SilentObserver\n"
        "from tests.controller.running import die_when\n"
        "if __name__ == '__main__':\n"
        "    run = RunDirectory(Path(sys.argv[1]))\n"
        "    die_when((run.checkpoints / 'latest').exists)\n"
        "    pretrain(run.config, run, SilentObserver(), False)\n"
    )
    script = run.path / "main.py"
    script.write_text(code)
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, str(script), str(run.path)]
    done = subprocess.run(command, env=os.environ | paths, start_new_session=True, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert (run.checkpoints / "latest").exists()
    assert not (run.checkpoints / "final").exists(), "it was killed on the way"


def test_what_ranks_cannot_train_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole copy"):
        resolve(_config(tmp_path, "x", {"ranks": 2, "fsdp": 2}, drafts={"num_layers": 1}))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    config = _config(tmp_path, "x", {"ranks": 2}).model_copy(update={"initial_checkpoint": str(foreign)})
    with pytest.raises(ConfigError):
        resolve(config)
