"""Results as a finished run writes them."""

from __future__ import annotations

from typing import Any

from etude.kit.durable import write_json
from etude.observe import JsonlSink, RunDirectory


def finished_report() -> dict[str, Any]:
    return {
        "name": "quickstart",
        "seed": 0,
        "wall_s": 571.2,
        "stages": {"midtrain_s": 252.0, "rl_s": 281.0, "evaluation_s": 38.2},
        "heldout_before": {
            "greedy": {
                "pass_rate": 0.458,
                "ci95": [0.396, 0.521],
                "n": 240,
                "by_level": {"1": 0.6, "2": 0.45, "3": 0.31},
            },
            "sampled": {"pass_rate": 0.108, "ci95": [0.075, 0.154], "n": 240},
        },
        "heldout_after": {
            "greedy": {
                "pass_rate": 0.833,
                "ci95": [0.781, 0.875],
                "n": 240,
                "by_level": {"1": 0.95, "2": 0.85, "3": 0.7},
            },
            "sampled": {"pass_rate": 0.612, "ci95": [0.549, 0.672], "n": 240},
        },
        "heldout_family_after": {"greedy": {"pass_rate": 0.5, "ci95": [0.437, 0.563], "n": 240}},
        "pass_at_8_before": 0.75,
        "pass_at_8_after": 0.875,
        "first_edit_right_before": 0.31,
        "first_edit_right_after": 0.58,
        "behaviour_before": {"calls": 6.1, "parallel_turns": 0.74, "malformed": 0.48},
        "behaviour_after": {"calls": 7.9, "parallel_turns": 1.92, "malformed": 0.14, "finish_share": 0.67},
        "throughput": {"decode_tokens_per_s": 6321.4, "prefill_tokens_per_s": 20100.0},
        "parity": {"k3": 0.0, "max_abs_dlogp": 0.0},
        "machine": {"cpu": "A processor", "cores": 2, "memory_bytes": 16 << 30},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "commit": "0123abcd",
    }


def write_finished_run(run: RunDirectory) -> None:
    """Fills a run directory with plausible figures of every kind."""
    with JsonlSink(run.metrics_file) as sink:
        for step in range(0, 500, 10):
            loss = 3.0 / (1 + step / 50)
            sink.write("midtrain", step, {"loss": loss, "agent_loss": 0.8 * loss, "tokens_per_s": 9000.0})
        for step in range(40):
            values = {
                "reward": 0.2 + step / 80,
                "pass_rate": 0.25 + step / 80,
                "parallel_turns": 0.7 + step / 40,
            }
            sink.write("rl", step, {**values, "reads_before_edits": 0.85, "wall_s": 250.0 + 8 * step})
        for split, step, greedy in (("before", 0, 0.46), ("after", 40, 0.83), ("family", 40, 0.5)):
            values = {"split": split, "greedy": greedy, "pass_rate": 0.7 * greedy, "wall_s": 250.0 + 8 * step}
            sink.write("evaluation", step, values)
        for step in (10, 20, 30):
            labels = {"split": "validation", "mode": "greedy", "wall_s": 250.0 + 8 * step}
            sink.write("evaluation", step, {**labels, "pass_rate": 0.4 + step / 100})
    write_json(run.report_file, finished_report())
    example = {"task": "t1", "title": "test_tally fails", "before": "gives <up>", "after": "edits & finishes"}
    write_json(run.examples_file, [example])
