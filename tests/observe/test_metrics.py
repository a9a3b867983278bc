import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import RunDirectoryError
from etude.observe import JsonlSink, read_metrics
from tests.fakes.disk import full_disk


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_rows_are_readable_at_once_and_carry_the_wall_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", Clock()
    sink = JsonlSink(path, clock)
    clock.now_s += 2.5
    sink.write("rl", 3, {"reward": np.float32(0.5), "lr": 1e-3, "note": "x"})
    assert read_metrics(path) == [
        {"kind": "rl", "step": 3, "wall_s": 2.5, "reward": 0.5, "lr": 1e-3, "note": "x"}
    ]
    sink.close()
    sink.close()


@given(st.integers(1, 60))
def test_a_half_written_line_is_cut_off_wherever_it_breaks(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path, clock = tmp_path_factory.mktemp("run") / "metrics.jsonl", Clock()
    with JsonlSink(path, clock) as sink:
        clock.now_s += 4
        sink.write("rl", 1, {"reward": 0.25})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: min(cut, len(whole) - 1)])
    assert [row["step"] for row in read_metrics(path)] == [1]
    clock.now_s = 1000.0
    with JsonlSink(path, clock) as sink:
        clock.now_s += 1
        sink.write("rl", 2, {"reward": 0.5})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["wall_s"] == 5.0


def test_a_step_written_again_after_resuming_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path) as sink:
        for step, reward in ((1, 0.1), (2, 0.2), (2, 0.3)):
            sink.write("rl", step, {"reward": reward})
        for split in ("validation", "heldout"):
            sink.write("evaluation", 2, {"split": split, "pass_rate": 0.5})
        for name in ("rl-00010", "rl-00020", "rl-00010"):
            sink.write("curve", 0, {"name": name})
    rows = read_metrics(path)
    assert [row["name"] for row in rows if row["kind"] == "curve"] == ["rl-00020", "rl-00010"]
    assert [row["reward"] for row in rows if row["kind"] == "rl"] == [0.1, 0.3]
    assert [row["split"] for row in rows if row["kind"] == "evaluation"] == ["validation", "heldout"]


def test_nan_and_infinities_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write("rl", 1, {"loss": math.nan, "norm": math.inf})
    row = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert (row["loss"], row["norm"]) == ("nan", "inf")


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "rl", "step": 1}\nnonsense\n{"kind": "rl", "step": 2}\n')
    with pytest.raises(RunDirectoryError, match="line 2"):
        read_metrics(path)


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_full_disk_neither_ends_a_run_nor_costs_its_rows_where_space_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write("rl", 1, {"reward": 0.1})
        size = path.stat().st_size
        for room in (0, 20):  # no byte, and a part of a row
            with full_disk(size + room), pytest.warns(UserWarning, match="not written"):
                sink.write("rl", 2 + room, {"reward": 0.2})
            assert [row["step"] for row in read_metrics(path)] == [1]
        sink.write("rl", 50, {"reward": 0.3})
        assert [row["step"] for row in read_metrics(path)] == [1, 2, 22, 50]


def test_a_disk_that_is_full_to_the_end_costs_rows_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write("rl", 1, {"reward": 0.1})
    with full_disk(path.stat().st_size), pytest.warns(UserWarning, match="not written"):
        for step in range(2, 500):  # more than any buffer
            sink.write("rl", step, {"reward": 0.2})
        sink.close()
    sink.close()
    assert [row["step"] for row in read_metrics(path)] == [1]
