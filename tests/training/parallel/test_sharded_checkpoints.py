"""Checkpoints of which each rank writes its part: read on other ranks, killed, damaged, without room."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.config.parallel import ParallelConfig
from etude.errors import CheckpointError
from etude.observe import MemorySink, SilentObserver
from etude.training.checkpoints import find_flaws, find_resumable, load_checkpoint, read_state
from etude.training.checkpoints.files import Flaw
from etude.training.checkpoints.history import History
from etude.training.checkpoints.shards import num_writers
from etude.training.parallel.ranks import SingleRank
from tests.training.parallel import storing
from tests.training.parallel.spawning import exit_codes, on_ranks
from tests.training.parallel.storing import Values
from tests.training.test_checkpoint_keeping import filled, small_disk

__all__ = ["small_disk"]

TOLERANCE = 2e-3
"""Of weights after three more steps, which move them by up to 0.05: what the order of sums makes of them."""
TWO = {"ranks": 2, "fsdp": 2}
FOUR = {"ranks": 4, "fsdp": 2, "expert": 2}
TENSOR = {"ranks": 4, "fsdp": 2, "tensor": 2}


def _everywhere(function: Any, sizes: dict[str, int], *arguments: Any) -> tuple[Values, Values]:
    """What it returns on every rank alike."""
    if sizes["ranks"] == 1:
        return function(SingleRank(), *arguments)
    first, *others = on_ranks(function, ParallelConfig.model_validate(sizes), *arguments)
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            _assert_equal(ours, theirs)
    return first


def _assert_equal(ours: Values, theirs: Values) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.array_equal(ours[name], value), name


def _assert_close(ours: Values, theirs: Values, start: Values) -> None:
    moved = max(float(np.abs(theirs[n] - start[n]).max()) for n in theirs if " " not in n)
    for name, value in theirs.items():
        if " " not in name:
            np.testing.assert_allclose(ours[name], value, atol=TOLERANCE, rtol=0, err_msg=name)
    assert moved > 10 * TOLERANCE, "a test of nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ranks": 1}, TWO),
        (FOUR, {"ranks": 1}),
        ({"ranks": 4, "fsdp": 4}, {"ranks": 2, "expert": 2}),
        ({"ranks": 4, "expert": 2, "context": 2}, {"ranks": 4, "fsdp": 4}),
        (FOUR, TENSOR),
        ({"ranks": 4, "expert": 2, "tensor": 2}, {"ranks": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_weights_and_states_are_the_same_bits_on_other_ranks_and_learn_on(
    tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    saved, straight = _everywhere(storing.save, before, tmp_path / "c", 2, 3)
    assert num_writers(tmp_path / "c") == (before["ranks"] if before["ranks"] > 1 else 0)
    read, resumed = _everywhere(storing.go_on, after, tmp_path / "c", 3)
    _assert_equal(read, saved)
    _assert_close(resumed, straight, saved)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [FOUR, TENSOR], ids=str)
def test_going_on_with_the_same_ranks_gives_the_bits_of_never_having_stopped(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    """With states in bfloat16, which are rounded at random: each copy of a part alike."""
    _, straight = _everywhere(storing.save, sizes, tmp_path / "c", 2, 3, "bfloat16")
    _, resumed = _everywhere(storing.go_on, sizes, tmp_path / "c", 3, "bfloat16")
    _assert_equal(resumed, straight)


def test_every_rank_writes_its_part_and_the_state_of_the_run_is_written_once(tmp_path: Path) -> None:
    saved, _ = _everywhere(storing.save, TWO, tmp_path / "c", 1)
    assert find_flaws(tmp_path / "c") == []
    assert num_writers(tmp_path / "c") == 2
    files = sorted((tmp_path / "c" / "shards").iterdir())
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.2 * min(sizes), "each has half"
    assert (tmp_path / "c" / "state.pt").stat().st_size < min(sizes), "states are in the shards"
    assert (read_state(tmp_path / "c") or {})["step"] == 1
    model, state = load_checkpoint(tmp_path / "c")
    assert state is not None and state["stage"] == "rl"
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), saved[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    _everywhere(storing.save, TWO, directory / "latest", 1)
    return directory / "latest"


def _damage(shard: Path, how: str) -> None:
    data = bytearray(shard.read_bytes())
    if how == "missing":
        shard.unlink()
        return
    if how == "truncated":
        del data[-7:]
    else:
        data[len(data) // 2] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_a_damaged_shard_is_refused_and_an_older_checkpoint_taken(
    tmp_path: Path, whole: Path, how: str
) -> None:
    latest = tmp_path / "latest"
    shutil.copytree(whole, tmp_path / "history" / "000001-rl-1")
    shutil.copytree(whole, latest)
    _damage(sorted((latest / "shards").iterdir())[1], how)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(latest)
    wrong = Flaw.MISSING if how == "missing" else Flaw.DAMAGED
    assert [flaw.flaw for flaw in find_flaws(latest)] == [wrong]
    metrics = MemorySink()
    assert find_resumable(latest, metrics, SilentObserver()) == tmp_path / "history" / "000001-rl-1"
    assert metrics.rows[0][f"skipped_{wrong}"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_all_ranks_refuse_what_one_finds_damaged(tmp_path: Path, whole: Path, how: str) -> None:
    shutil.copytree(whole, tmp_path / "c")
    _damage(sorted((tmp_path / "c" / "shards").iterdir())[0], how)
    for said, unchanged in on_ranks(storing.refuse, ParallelConfig(ranks=2), tmp_path / "c", {}):
        assert said.startswith("CheckpointError: is damaged")
        assert unchanged


@pytest.mark.slow
def test_another_architecture_is_refused_on_every_rank(whole: Path) -> None:
    for said, unchanged in on_ranks(
        storing.refuse, ParallelConfig(ranks=2, fsdp=2), whole, {"num_layers": 1}
    ):
        assert said == "CheckpointError: has another architecture than the run"
        assert unchanged


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("num_syncs", [1, 3])
def test_a_rank_killed_while_it_saves_leaves_the_older_checkpoint(
    tmp_path: Path, victim: int, num_syncs: int
) -> None:
    """The first rank syncs its shard, then all files; another only its shard."""
    if victim and num_syncs > 1:
        pytest.skip("it syncs one file")
    told, latest = tmp_path / "told", tmp_path / "latest"
    codes = exit_codes(
        storing.die_while_saving, ParallelConfig(ranks=2, fsdp=2), latest, victim, num_syncs, told
    )
    assert codes[victim] == -9
    assert codes[1 - victim] == 0
    assert told.read_text() == "RankError"
    metrics = MemorySink()
    assert find_resumable(latest, metrics, SilentObserver()) == latest
    assert (read_state(latest) or {})["step"] == 1
    load_checkpoint(latest)
    unfinished = any("skipped_unfinished" in row for row in metrics.rows)
    assert unfinished == (victim == 0), "what is half-written is removed, unless who would is gone"


@pytest.mark.slow
@pytest.mark.parametrize("short_of", ["shards", "state"])
def test_a_full_disk_costs_ranks_the_new_checkpoint_only(small_disk: Path, short_of: str) -> None:
    config = ParallelConfig(ranks=2, fsdp=2)
    _everywhere(storing.save, TWO, small_disk / "latest", 1)
    digests = json.loads((small_disk / "latest" / "digests.json").read_text())
    num_bytes = {"shards": 0, "state": 200_000}[short_of]
    shard = (small_disk / "latest" / "shards").stat().st_size
    filled(small_disk, 65_536 + shard)
    assert on_ranks(storing.save_again, config, small_disk / "latest", num_bytes) == ["ResourceError"] * 2
    assert not (small_disk / ".latest.partial").exists()
    assert json.loads((small_disk / "latest" / "digests.json").read_text()) == digests
    assert find_flaws(small_disk / "latest") == []


@pytest.mark.slow
def test_ranks_go_on_while_they_save_what_there_was_at_the_call(tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    answers: list[Any] = on_ranks(storing.keep, ParallelConfig(ranks=2, fsdp=2), latest)
    assert answers[0] and all(answers[0][1:])
    assert [entry.step for entry in History(latest).entries()] == [2], "two are kept"
    load_checkpoint(History(latest).entries()[0].path)
