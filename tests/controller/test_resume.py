"""A run may be killed at any moment: nothing is lost, repeated or skipped, and the weights are the same."""

import json
import signal
from pathlib import Path

import pytest

from etude.config import RunConfig
from etude.errors import CheckpointError
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.controller.learning import CONFIG, learned
from tests.controller.running import (
    adopting_orphans,
    changed,
    collected,
    final_weights,
    num_rl_steps,
    run_elsewhere,
    run_here,
    tiny_config,
    wait_until,
    weights_of,
)
from tests.sandbox.test_lifecycle import eventually


def midtraining_config(directory: Path) -> RunConfig:
    """Long enough in mid-training to be killed there twice."""
    midtrain = {"num_steps": 300, "tokens_per_step": 512, "micro_batch_tokens": 128}
    checkpoint = {"every_s": 0.1, "curve_every_steps": 0}
    return tiny_config(
        directory, midtrain=midtrain, rl={"num_steps": 1}, evaluation={"num_tasks": 1}, checkpoint=checkpoint
    )


def learning_config(directory: Path) -> RunConfig:
    """RL that changes the weights at each step, from a model that can play."""
    tree = CONFIG.model_dump(mode="json")
    tree |= {"runs_directory": str(directory), "initial_checkpoint": str(learned())}
    tree["rl"] |= {"num_steps": 5, "groups_per_step": 6, "group_size": 4, "level_weights": [1.0, 0.0, 0.0]}
    tree["rl"] |= {"micro_batch_tokens": 1024}
    tree |= {
        "evaluation": {"num_tasks": 4, "num_samples": 1},
        "checkpoint": {"every_s": 0.001, "curve_every_steps": 0},
    }
    return RunConfig.model_validate(tree)


def rl_figures(run: RunDirectory) -> list[tuple[int, float, float, float]]:
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    return [(row["step"], row["reward"], row["trained_groups"], row.get("grad_norm", 0.0)) for row in rows]


@pytest.mark.slow
def test_mid_training_goes_on_bit_for_bit_after_a_kill_and_an_interrupt(tmp_path: Path) -> None:
    undisturbed, report = run_here(midtraining_config(tmp_path / "whole"))
    config = changed(midtraining_config(tmp_path / "broken"), num_threads=0)  # chosen anew in each process
    checkpoints = Path(config.runs_directory) / config.name / "checkpoints"
    latest, done = checkpoints / "latest" / "digests.json", checkpoints / "midtrained"
    with run_elsewhere(config) as process:
        wait_until(process, latest.exists)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not done.exists()
    first_save = latest.stat().st_mtime_ns
    with adopting_orphans() as left_behind, run_elsewhere(config, resume=True) as process:
        wait_until(process, lambda: latest.exists() and latest.stat().st_mtime_ns > first_save)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 130, output
        assert "interrupted; state saved" in output
        assert "--resume" in output
        assert eventually(lambda: not left_behind())
    assert not done.exists()
    resumed, resumed_report = run_here(config, resume=True)
    assert final_weights(resumed) == final_weights(undisturbed)
    assert collected(resumed) == collected(undisturbed)
    assert resumed_report["heldout_after"] == report["heldout_after"]
    steps = [row["step"] for row in read_metrics(resumed.metrics_file) if row["kind"] == "midtrain"]
    assert steps == list(range(10, 301, 10))


@pytest.mark.slow
def test_reinforcement_learning_goes_on_bit_for_bit_after_interrupts(tmp_path: Path) -> None:
    """Two at once stop it at once, as a kill does; one lets it save its state."""
    undisturbed, report = run_here(learning_config(tmp_path / "whole"))
    assert final_weights(undisturbed) != weights_of(learned()), "without learning this would show nothing"
    config = changed(learning_config(tmp_path / "broken"), num_threads=2)
    with adopting_orphans() as left_behind:
        with run_elsewhere(config) as process:
            wait_until(process, lambda: num_rl_steps(config) >= 1)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 130, output
            assert "Traceback" not in output
        assert eventually(lambda: not left_behind()), "sandboxes outlive the run that made them"
        stopped = json.loads((tmp_path / "broken" / config.name / "report.json").read_text())
        assert "heldout_before" in stopped
        assert "heldout_after" not in stopped
        steps_before = num_rl_steps(config)
        with run_elsewhere(config, resume=True) as process:
            wait_until(process, lambda: num_rl_steps(config) > steps_before)
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 130, output
        assert eventually(lambda: not left_behind())
    steps_before = num_rl_steps(config)
    assert 2 <= steps_before < 5
    resumed, resumed_report = run_here(config, resume=True)
    sessions = collected(resumed)
    assert len({identity for identity, *_ in sessions}) == len(sessions)
    assert sessions == collected(undisturbed)
    assert rl_figures(resumed) == rl_figures(undisturbed)
    assert final_weights(resumed) == final_weights(undisturbed)
    for name in ("heldout_before", "heldout_after", "heldout_family_after", "parity", "rl_steps"):
        assert resumed_report[name] == report[name], name


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_by_name_or_an_older_one_taken(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    run, _ = run_here(config)
    weights = final_weights(run)
    report = json.loads(run.report_file.read_text())
    unfinished = {key: report[key] for key in report if key != "rl_steps"}
    run.report_file.write_text(json.dumps(unfinished))
    _damage(run.checkpoints / "latest")
    run_here(config, resume=True)
    assert final_weights(run) == weights
    assert (run.checkpoints / "damaged" / "latest").is_dir()
    skipped = [row for row in read_metrics(run.metrics_file) if "skipped_damaged" in row]
    assert [row["kind"] for row in skipped] == ["resume"]
    run.report_file.write_text(json.dumps(unfinished))
    _damage(run.checkpoints / "midtrained")
    with pytest.raises(CheckpointError, match=r"damaged.*midtrained"):
        run_here(config, resume=True)


def _damage(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
