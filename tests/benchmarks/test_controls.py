"""Controls are compared with RL by seed and task, and README has the resulting table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import controls
import pytest
from common import put_table
from controls_recipes import CONTROLS, RL, Pace
from controls_statistics import figures_of, lead_over, share_solved, table_of

from etude.config import dump_config
from tests.controller.running import tiny_config

BEST = next(recipe for recipe in CONTROLS if recipe.name == "best_of_group")
README = Path(__file__).parents[2] / "README.md"


def row(verdicts: str, steps: int = 30, train_s: float = 100.0) -> dict[str, Any]:
    found = {"heldout": {"greedy": verdicts, "sampled": verdicts}}
    where = {"machine": "a machine", "commit": "abc"}
    took = {"train_s": train_s, "processor_s": train_s, "sampled_tokens": 5_000.0}
    return {"verdicts": found, "rl_steps": steps} | took | where


def peers(ours: str, theirs: str, num_seeds: int = 5) -> dict[str, Any]:
    """A comparison in which every seed has the same verdicts."""
    rows = {"midtrained": {"wall": row("0" * len(ours))}, "rl": {"wall": row(ours)}}
    rows |= {BEST.name: {"wall": row(theirs), "tokens": row(ours)}}
    clusters = " ".join(f"family-{number // 2}" for number in range(len(ours)))
    trial = {"settings": ["rl.optimizer.learning_rate=0.001"], "solved": 0.5} | row("1")
    return {
        "tuning": {"rl": [trial], BEST.name: [trial]},
        "timing": {"stages": {"rl_s": 200.0}},
        "clusters": {"heldout": clusters},
        "runs": {str(seed): rows for seed in range(num_seeds)},
    }


def test_a_lead_is_paired_by_task_and_an_interval_that_holds_0_is_a_tie() -> None:
    ahead = lead_over(peers("1" * 20, "1000" * 5), BEST)
    assert ahead is not None
    assert ahead.mean == pytest.approx(0.75)
    assert 0 < ahead.low < 0.75 < ahead.high
    assert not ahead.is_tie
    tie = lead_over(peers("10" * 10, "01" * 10), BEST)
    assert tie is not None
    assert tie.text().startswith("tie: +0.0")
    assert lead_over(peers("1" * 20, "0" * 20), CONTROLS[0]) is None, "was not run"


def test_what_differs_between_seeds_widens_the_interval() -> None:
    mixed = peers("1" * 20, "0" * 20)
    mixed["runs"]["4"] = mixed["runs"]["4"] | {"rl": {"wall": row("0" * 20)}}
    lead = lead_over(mixed, BEST)
    assert lead is not None
    assert lead.mean == pytest.approx(0.8)
    assert lead.low < 0.8 < lead.high, "every task has the same mean: only drawing seeds has a width"


def test_voided_sessions_are_left_out_of_both_sides() -> None:
    stored = peers("1x10", "0110")
    lead = lead_over(stored, BEST)
    assert lead is not None
    assert lead.mean == pytest.approx(1 / 3)
    assert share_solved(stored["runs"]["0"]["rl"]["wall"]["verdicts"]) == pytest.approx(2 / 3)


def test_the_figures_name_the_best_control_and_what_the_report_says_of_observed() -> None:
    stored = peers("1" * 20, "1000" * 5)
    stored["runs"]["0"]["midtraining"] = {"wall": row("1100" * 5)}
    for rows in stored["runs"].values():
        rows["rl"]["wall"]["observed_first_edit_ceiling"] = 0.25
    figures = figures_of(stored)
    assert figures["rl_over_best_of_group"] == pytest.approx(0.75)
    assert figures["rl_over_best_control_sampled"] == pytest.approx(0.5)
    assert figures["rl_over_best_of_group_sampled_equal_tokens"] == 0.0
    assert (figures["seeds"], figures["observed_first_edit_ceiling"]) == (5.0, 0.25)


def test_a_control_takes_as_many_steps_as_fit_into_the_time_and_the_tokens_of_rl() -> None:
    results = controls.Results(Path("unused"), peers("1", "1"))
    results.peers["tuning"][BEST.name] = [
        {"solved": 0.4} | row("1", steps=30),
        {"solved": 0.6} | row("1", steps=30, train_s=50.0),
    ]
    assert results.settings_of(BEST) == 1
    assert results.pace_of(BEST) == Pace(seconds=0.5, sampled_tokens=1.0)


def test_files_of_other_machines_bring_their_seeds(tmp_path: Path) -> None:
    results = controls.Results(tmp_path / "one.json", peers("1", "0", num_seeds=1) | {"timing": None})
    other = controls.Results(tmp_path / "other.json", peers("0", "1", num_seeds=2))
    results.peers["runs"]["0"] = {"rl": results.peers["runs"]["0"]["rl"]}
    other.peers["tuning"]["rl"] = other.peers["tuning"]["rl"] * 2
    other.save()
    results.merge([other.path])
    joined = controls.Results.load(results.path).peers
    assert set(joined["runs"]) == {"0", "1"}
    assert share_solved(joined["runs"]["0"]["rl"]["wall"]["verdicts"]) == 1.0, "its own stays"
    assert BEST.name in joined["runs"]["0"], "what another lane measured of the same seed"
    assert len(joined["tuning"]["rl"]) == 2 and len(joined["tuning"][BEST.name]) == 1
    assert joined["timing"] == other.peers["timing"]


def test_as_many_settings_are_tried_for_rl_as_for_every_control() -> None:
    assert {len(recipe.trials) for recipe in (RL, *CONTROLS)} == {3}


def test_the_table_replaces_what_is_between_its_comments(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    begin, end = "<!-- benchmarks/controls.py: begin -->\n", "<!-- benchmarks/controls.py: end -->"
    document.write_text(f"before\n{begin}old\n{end}\nafter\n")
    table = table_of(peers("1" * 20, "1000" * 5))
    put_table(document, "controls.py", table)
    text = document.read_text()
    assert text == f"before\n{begin}{table}{end}\nafter\n"
    assert "each group's best by total reward | `learning_rate = 0.001` | 25.0 % | +75.0 (" in text
    assert "tie: +0.0" in text, "at equal sampled tokens"


def test_the_readme_has_the_table_of_the_committed_results(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    assert "<!-- benchmarks/controls.py: begin -->" in copy.read_text()
    put_table(copy, "controls.py", table_of(controls.Results.load(controls.RESULTS).peers))
    assert copy.read_text() == README.read_text(), "benchmarks/controls.py --table README.md"


@pytest.mark.slow
def test_the_script_tunes_compares_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = tmp_path / "results.json", tmp_path / "tiny.toml"
    config.write_text(dump_config(tiny_config(tmp_path / "runs")))
    names = "rl,rejection_once,best_of_group"
    command = ["controls.py", "--config", str(config), "--runs", str(tmp_path / "runs"), "--tasks", "3"]
    command += ["--trials", "1", "--seeds", "0", "--only", names, "--json", str(file)]
    monkeypatch.setattr("sys.argv", [*command, "--minutes", "0"])
    controls.main()
    assert not controls.Results.load(file).peers["runs"], "no time for a run"
    monkeypatch.setattr("sys.argv", command)
    controls.main()
    stored = controls.Results.load(file).peers
    rows = stored["runs"]["0"]
    assert set(rows) == {"midtrained", *names.split(",")}
    assert set(rows["best_of_group"]) == set(rows["rejection_once"]) == {"wall", "tokens"}
    assert {len(found["sampled"]) for found in rows["rl"]["wall"]["verdicts"].values()} == {3}
    assert rows["rejection_once"]["tokens"]["sampled_tokens"] > 0
    assert all(trials[0]["settings"] for trials in stored["tuning"].values())
    before = sorted((tmp_path / "runs").iterdir())
    controls.main()
    assert sorted((tmp_path / "runs").iterdir()) == before
    assert "rl_over_best_control_sampled" in capsys.readouterr().out
