# ruff: noqa: RUF001
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from etude.config import parse_config
from etude.kit.durable import write_json
from etude.observe import RunDirectory
from etude.observe.report import (
    Comparison,
    Estimate,
    behaviour_comparisons,
    build_report,
    headline,
    next_steps,
    plots,
    results_comparisons,
)
from etude.observe.report.summary import facts
from tests.observe.report_data import finished_report, write_finished_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(parse_config({"runs_directory": str(tmp_path), "name": "demo"}))


class Page(HTMLParser):
    """Collects text, links and unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_finished_run_becomes_plots_and_one_self_contained_page(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    draw = plots._png
    monkeypatch.setattr(plots, "_png", lambda figure: [figures.append(figure), draw(figure)][1])
    write_finished_run(run)
    path = build_report(run)
    for figure in figures:
        (axes,), (legend,) = figure.axes, figure.legends
        assert axes.get_legend() is None
        assert not legend.get_window_extent().overlaps(axes.get_tightbbox()), "it lies below the lines"
    assert len(figures) == 4
    assert path == run.html_file
    names = sorted(plot.stem for plot in run.plots.iterdir())
    assert names == ["behaviour", "midtrain_loss", "pass_rate", "reward"]
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in run.plots.iterdir())
    page = Page(path.read_text())
    assert page.open == []
    assert len(page.sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    for expected in (
        "83.3 % (78.1–87.5)",
        "45.8 %",
        "+37.5",
        "level 3",
        "6,321 tokens/s",
        "9 min 31 s",
        "k3",
    ):
        assert expected in page.text


def test_everything_from_outside_is_escaped(run: RunDirectory) -> None:
    attack = "<script>alert('x')</script>"
    examples = [{"task": "t", "title": attack, "before": attack, "after": f"</pre>{attack}"}]
    write_json(run.examples_file, examples)
    report = {"name": attack, "commit": attack, "versions": {attack: attack}, "machine": {"cpu": attack}}
    labels = {"behaviour_before": {attack: 1.0}, "throughput": {attack: 2.0}, "parity": {attack: 0.1}}
    labels["parity_gate"] = {attack: 0.2}
    write_json(run.report_file, {**report, **labels})
    page = build_report(run).read_text()
    assert "<script" not in page
    assert "</pre>&lt;" not in page
    assert Page(page).open == []


@pytest.mark.parametrize("keys", [[], ["name"], ["heldout_before"], ["heldout_after", "stages"]])
def test_a_run_in_progress_shows_what_there_is(run: RunDirectory, keys: list[str]) -> None:
    write_json(run.report_file, {key: finished_report()[key] for key in keys})
    assert Page(build_report(run).read_text()).open == []


def test_an_empty_run_has_a_page_and_no_plots(run: RunDirectory) -> None:
    assert "not been evaluated" in build_report(run).read_text()
    assert list(run.plots.iterdir()) == []


def test_odd_values_are_left_out_instead_of_breaking_the_page() -> None:
    report = {"heldout_before": {"greedy": None, "sampled": {"pass_rate": "?"}}, "behaviour_after": [1]}
    assert results_comparisons(report) == []
    assert behaviour_comparisons(report) == []
    assert "not been evaluated" in headline(report)


def test_results_are_compared_row_by_row() -> None:
    rows = {row.label: row for row in results_comparisons(finished_report())}
    assert rows["held-out tasks, greedy"].cells() == (
        "45.8 % (39.6–52.1)",
        "83.3 % (78.1–87.5)",
        "+37.5",
    )
    assert rows["level 3"].detail
    assert rows["unseen families, greedy"].cells() == ("—", "50.0 % (43.7–56.3)", "")
    assert rows["held-out tasks, at least one of 8 at temperature 1"].cells() == ("75.0 %", "87.5 %", "+12.5")
    assert rows["first edit right, temperature 1"].change == "+27.0"


def test_means_are_not_shown_in_per_cent() -> None:
    row = Comparison("calls", Estimate(0.74), Estimate(1.92), share=False)
    assert row.cells() == ("0.74", "1.92", "+1.18")


def test_suggestions_follow_from_the_results() -> None:
    commands = [item.command for item in next_steps(finished_report(), "runs/quickstart")]
    assert any("rl.level_weights=[1,1,2]" in command for command in commands)
    assert any("malformed_penalty" in command for command in commands)
    assert any(command.startswith("etude agent --run runs/quickstart") for command in commands)
    assert not any("level_weights" in item.command for item in next_steps({}, "runs/quickstart"))


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        (
            0,
            "The model solves 45.8 % of the held-out tasks; no step of reinforcement",
        ),
        (1, "held-out tasks; 45.8 % before 1 of 80 steps of reinforcement learning."),
        (80, "held-out tasks; 45.8 % before 80 steps of reinforcement learning."),
    ],
)
def test_the_end_says_how_many_steps_there_were_and_compares_nothing_with_itself(
    taken: int, words: str
) -> None:
    report = {**finished_report(), "rl_steps": taken, "rl_steps_planned": 80, "forecast_s": 840.0}
    report["families"] = {"composed": {"before": {"pass_at_8": 0.25}, "after": {"pass_at_8": 0.5}}}
    assert words in headline(report)
    assert dict(facts(report))["RL steps"] == f"{taken} of 80"
    assert dict(facts(report))["forecast at its start"] == "14 min 00 s"
    rows = {row.label: row.cells() for row in results_comparisons(report)}
    behaviour = behaviour_comparisons(report)
    composed = rows["composed tasks, at least one of 8 at temperature 1"]
    assert composed == (("25.0 %", "50.0 %", "+25.0") if taken else ("25.0 %", "—", ""))
    if taken:
        assert rows["held-out tasks, greedy"][2] == "+37.5"
    else:
        assert rows["held-out tasks, greedy"] == ("45.8 % (39.6\N{EN DASH}52.1)", "\N{EM DASH}", "")
        assert rows["unseen families, greedy"][0].startswith("50.0 %")
    assert all(bool(row.change) == bool(taken) for row in behaviour if row.before and row.label[0] == "t")
    longer = {item.reason: item.command for item in next_steps(report, "runs/demo")}["train longer"]
    assert longer == "etude train --config runs/demo/config.toml --name longer --set rl.num_steps=120"
