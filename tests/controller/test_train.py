import json
from pathlib import Path
from typing import Any

import pytest

from etude.controller.evaluate import load_policy
from etude.controller.evaluation import EvaluationRequest, evaluate
from etude.controller.evaluation_targets import TargetOptions
from etude.controller.forecast import Speeds
from etude.controller.probing import probe_speeds
from etude.controller.train import InterruptedRunError
from etude.errors import ConfigError, RunDirectoryError
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import RecordingObserver, SilentObserver
from etude.store.trajectories import TrajectoryLog
from etude.tokens import Tokenizer
from etude.training import load_checkpoint
from tests.controller.running import collected, final_weights, run_here, tiny_config
from tests.controller.test_vllm_run import checkpoint, small_model

NUM_SESSIONS = 10
"""Of two steps: two groups, then three, because none of the first were useful."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RecordingObserver]:
    """A whole run with everything in it."""
    observer = RecordingObserver()
    run, _ = run_here(tiny_config(tmp_path_factory.mktemp("runs")), observer=observer, probe=probe_speeds)
    return run, observer


def test_the_report_holds_what_the_readme_promises(finished: tuple[RunDirectory, RecordingObserver]) -> None:
    run, _ = finished
    report = json.loads(run.report_file.read_text())
    assert report["seed"] == 0
    assert (report["rl_steps"], report["rl_steps_planned"]) == (2, 2)
    assert report["wall_s"] > 0
    for name in ("heldout_before", "heldout_after", "heldout_family_before", "heldout_family_after"):
        for mode in ("greedy", "sampled"):
            figures = report[name][mode]
            low, high = figures["ci95"]
            assert 0.0 <= low <= figures["pass_rate"] <= high <= 1.0
            assert figures["n"] == 4
    for when in ("before", "after"):
        assert 0.0 <= report[f"first_edit_right_{when}"] <= 1.0
        assert 0.0 <= report[f"pass_at_2_{when}"] <= 1.0
        assert 1.0 <= report[f"behaviour_{when}"]["turns"] <= 2.0
    assert report["forecast_s"] > 0
    assert report["parity"] == {"k3": 0.0, "max_abs_dlogp": 0.0}
    assert report["throughput"]["decode_tokens"] > 0
    assert report["throughput"]["episodes"] == NUM_SESSIONS + 2, "with those of the look at validation"
    assert set(report["stages"]) == {"midtrain_s", "rl_s", "evaluation_s"}
    assert sum(report["stages"].values()) <= report["wall_s"]
    assert report["versions"]["torch"]
    assert report["machine"]


def test_the_run_directory_tells_the_whole_story(finished: tuple[RunDirectory, RecordingObserver]) -> None:
    run, observer = finished
    rows = read_metrics(run.metrics_file)
    assert [row["step"] for row in rows if row["kind"] == "midtrain"] == [10, 20]
    assert [row["step"] for row in rows if row["kind"] == "rl"] == [1, 2]
    assert [row["step"] for row in rows if row["kind"] == "price"] == [0], "before the first step"
    splits = [row["split"] for row in rows if row["kind"] == "evaluation"]
    assert splits == ["before", "family_before", "after", "family"]
    times = [row["wall_s"] for row in rows if row["kind"] != "checkpoint"]  # those have the file's own clock
    assert times == sorted(times)
    names = [row["name"] for row in rows if row["kind"] == "curve"]
    assert names == ["midtrain-00005", "midtrain-00010", "midtrain-00015", "rl-00001", "rl-00002"]
    assert all((run.checkpoints / "curve" / name / "model.safetensors").exists() for name in names)
    assert [name for name, _ in observer.stages] == [
        "mid-training",
        "evaluation before",
        "evaluation family before",
        "reinforcement learning",
        "evaluation after",
        "evaluation family",
    ]
    assert observer.open_stage is None
    shown = [step for stage, step, _ in observer.advances if stage == "evaluation before"]
    assert shown == [*range(1, 12), 11], "4 tasks in two ways, 3 of them once more"
    assert [name for name, _ in observer.expected] == [name for name, _ in observer.stages]
    assert all(seconds > 0 for _, seconds in observer.expected)
    assert sum(line.startswith("about ") for line in observer.lines) == 1
    assert len(TrajectoryLog(run.trajectories)) == NUM_SESSIONS
    assert run.environment["compute_threads"] == 1
    assert json.loads(run.examples_file.read_text()) == []


@pytest.mark.slow
def test_a_finished_run_can_be_evaluated_again_with_equal_figures(
    finished: tuple[RunDirectory, RecordingObserver],
) -> None:
    run, _ = finished
    report = json.loads(run.report_file.read_text())

    def measure(num_tasks: int, checkpoint: str | None = None, mode: str = "sampled") -> dict[str, Any]:
        options = TargetOptions(checkpoint=checkpoint)
        request = EvaluationRequest(str(run.path), num_tasks=num_tasks, options=options)
        return dict(evaluate(request, SilentObserver()).modes[mode].figures)

    after, before = report["heldout_after"]["sampled"], report["heldout_before"]["greedy"]
    again, first = measure(4), measure(4, "midtrained", "greedy")
    for name in ("pass_rate", "n", "by_level", "by_bug", "first_edit_right"):
        assert (again[name], first[name]) == (after[name], before[name])
    assert measure(1, "rl-00001")["n"] == 1


def test_what_cannot_be_evaluated_is_told(finished: tuple[RunDirectory, RecordingObserver]) -> None:
    run, _ = finished
    with pytest.raises(RunDirectoryError, match=r"one of .*final.*latest.*midtrained.*rl-00001"):
        load_policy(run, "none")
    with pytest.raises(ConfigError, match="one of heldout, validation, heldout_family, observed_train, "):
        evaluate(EvaluationRequest(str(run.path), suite="test"), SilentObserver())


def test_a_time_limit_becomes_steps_and_what_is_stored_takes_the_same_ones(
    finished: tuple[RunDirectory, RecordingObserver], tmp_path: Path
) -> None:
    initial = str(finished[0].checkpoints / "midtrained")
    asked = tiny_config(tmp_path / "a", initial_checkpoint=initial, max_wall_s=3000.0)
    first, report = run_here(asked, probe=lambda *_: Speeds(0.0, rl_step_s=1000.0, evaluation_s=350.0))
    assert (first.config.rl.num_steps, first.config.max_wall_s) == (1, 0.0), "and four evaluations"
    assert (report["rl_steps"], report["rl_steps_planned"]) == (1, 1)
    assert 2500.0 < report["forecast_s"] < 3000.0
    assert run_here(asked, resume=True)[1] == report
    assert "midtrain_s" not in report["stages"]
    assert not (first.checkpoints / "midtrained").exists()
    assert next(row["kind"] for row in read_metrics(first.metrics_file)) == "evaluation"
    stored = first.config.model_copy(update={"runs_directory": str(tmp_path / "b")})
    second, _ = run_here(stored, probe=probe_speeds)
    assert collected(first) == collected(second)
    assert final_weights(first) == final_weights(second)


@pytest.mark.slow
def test_a_checkpoint_with_more_rows_than_its_tokenizer_has_tokens_is_sampled_and_trained(
    tmp_path: Path,
) -> None:
    initial = checkpoint(tmp_path / "initial", lambda num_tokens: small_model(num_tokens + 61))
    config = tiny_config(
        tmp_path,
        initial_checkpoint=str(initial),
        rl={"num_steps": 1, "groups_per_step": 1},
        evaluation={"num_tasks": 1},
        parity={"num_sequences": 2, "max_tokens": 64},
    )
    run, report = run_here(config)
    assert report["rl_steps"] == 1
    num_tokens = Tokenizer.load(initial).vocab_size
    assert load_checkpoint(run.checkpoints / "final")[0].vocab_size == num_tokens + 61


def test_a_time_that_is_too_short_is_refused_before_anything_is_kept(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_wall_s=10.0)
    run = RunDirectory.create(config)
    with pytest.raises(ConfigError, match="max_wall_s: is too short"), run.removed_if_refused():
        run_here(config, resume=True)
    assert not run.path.exists()


def test_a_finished_run_has_nothing_left_to_do(finished: tuple[RunDirectory, RecordingObserver]) -> None:
    run, _ = finished
    stored = run.report_file.read_bytes()
    _, report = run_here(run.config, resume=True)
    assert report == json.loads(stored)
    assert run.report_file.read_bytes() == stored


def test_a_second_writer_is_refused(finished: tuple[RunDirectory, RecordingObserver]) -> None:
    run, _ = finished
    with run.lock(), pytest.raises(RunDirectoryError, match="another process"):
        run_here(run.config, resume=True)


def test_being_interrupted_is_no_error_of_the_system() -> None:
    assert issubclass(InterruptedRunError, KeyboardInterrupt)
