"""The demonstration's decisions and figures, without its runs, which take hours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demonstration import find_best, table_of, well_formed_share
from made_learning import count_changed_lines, learned_table, solved_share
from published_gpu import summarize_rows

from etude.evaluation import EvaluationResult, ModeResult
from etude.evaluation.sessions import SessionRow

ROOT = Path(__file__).parents[2]


def row(task: str, passed: bool, malformed: int = 0) -> SessionRow:
    return SessionRow(task, task, 0, "ended", passed, float(passed), 1.0, 1.0, 1, 1, 0, malformed, 1.0)


def test_sft_ends_when_validation_has_not_risen_in_two_rounds() -> None:
    assert find_best([0.0]) == (0, False)
    assert find_best([0.1, 0.3, 0.3]) == (1, False)
    assert find_best([0.1, 0.3, 0.2, 0.3]) == (1, True)
    assert find_best([0.1, 0.3, 0.2, 0.4]) == (3, False)
    assert find_best([0.1], most_rounds=1) == (0, True)


def test_a_lead_is_split_by_whether_calls_were_well_formed_before() -> None:
    before = [row("a", False), row("b", False, malformed=2), row("c", True), row("d", False)]
    control = [row("a", False), row("b", False), row("c", True), row("d", False)]
    trained = [row("a", True), row("b", True), row("c", False), row("d", True)]
    assert well_formed_share(before, control, trained) == 0.5
    assert well_formed_share(before, trained, control) == 0.0


def test_the_documents_table_is_that_of_the_committed_results() -> None:
    kept = sorted((ROOT / "benchmarks" / "results").glob("demonstration_*.json"))
    shown = [json.loads(path.read_text(encoding="utf-8"))["figures"] for path in kept]
    assert table_of(shown) in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_table_of_made_tasks_is_that_of_the_committed_results() -> None:
    kept = (ROOT / "benchmarks" / "results").glob("made_learning_*.json")
    learned = [json.loads(path.read_text(encoding="utf-8"))["figures"] for path in kept]
    assert learned_table(learned) in (ROOT / "docs" / "made-tasks.md").read_text(encoding="utf-8")


def test_a_gpu_s_steps_are_summarised() -> None:
    steps = [
        {"kind": "rl", "wall_s": 5.0 * step, "rollout_s": 2.0, "train_s": 1.0, "train_tokens": 300.0}
        | {"episodes": 4.0, "sampled_tokens": 50.0, "pass_rate": step / 10}
        for step in (1, 2, 3, 4)
    ]
    parity = [{"kind": "parity", "k3": k3, "max": 10 * k3} for k3 in (1e-6, 3e-6, 2e-6)]
    figures = summarize_rows([*steps, *parity])
    assert (figures["steps"], figures["publications"], figures["step_s"]) == (4.0, 3.0, 5.0)
    assert (figures["k3_median"], figures["k3_max"]) == (2e-6, 3e-6)
    assert (figures["sampled_tokens_per_s"], figures["trained_tokens_per_s"]) == (100.0, 300.0)
    assert figures["pass_rate_last_quarter"] - figures["pass_rate_first_quarter"] == pytest.approx(0.3)


def test_a_task_counts_by_pass_at_8_once_it_has_so_many_sessions() -> None:
    rows = tuple(
        row(task, passed)
        for task, marks in (("a", "+-------"), ("b", "--------"), ("c", "+"))
        for passed in map("+".__eq__, marks)
    )
    result = EvaluationResult({}, "easiest", 0, {"sampled": ModeResult(1.0, {}, rows)}, {})
    assert solved_share(result) == 0.5


def test_the_size_of_a_change_counts_what_its_solution_adds_and_takes_away(tmp_path):
    workspace, files = tmp_path / "environment" / "workspace", tmp_path / "solution" / "files"
    for directory in (workspace, files / "lib"):
        directory.mkdir(parents=True)
    (workspace / "a.py").write_text("x = 1\nreturn x\n")
    (files / "a.py").write_text("return 1\n")
    (files / "lib" / "new.py").write_text("y = 2\n")
    assert count_changed_lines(tmp_path) == 4
