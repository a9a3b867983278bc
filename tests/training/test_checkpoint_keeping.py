"""Checkpoints beside training: asynchronous, kept by rule, found again whole, on a disk that may be full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config import CheckpointConfig
from etude.errors import CheckpointError, ResourceError
from etude.model import LanguageModel
from etude.observe import MemorySink, SilentObserver
from etude.training.checkpoints import (
    CheckpointKeeper,
    find_flaws,
    find_resumable,
    load_checkpoint,
    save_checkpoint,
)
from etude.training.checkpoints.files import DIGESTS, Flaw
from etude.training.checkpoints.history import History
from etude.training.checkpoints.saving import load_state
from tests.model.builders import small_model

SIZE = 1 << 20
"""Bytes of the small disk: room for some checkpoints of `small_model`."""


def _keeper(directory: Path, metrics: MemorySink | None = None, **changes: Any) -> CheckpointKeeper:
    config = CheckpointConfig.model_validate({"every_s": 1e-6, **changes})
    return CheckpointKeeper(directory / "latest", config, metrics or MemorySink(), SilentObserver())


def _state(step: int, **more: Any) -> dict[str, Any]:
    return {"stage": "rl", "step": step, "momentum": torch.full((4,), float(step)), **more}


def _steps(directory: Path) -> list[int]:
    """Steps of all that are kept, oldest first."""
    newest = load_checkpoint(directory / "latest")[1]
    assert newest is not None
    return [*(kept.step for kept in History(directory / "latest").entries()), newest["step"]]


def _same(a: LanguageModel, b: LanguageModel) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    model, state, go_on = small_model(1), _state(3), threading.Event()
    keeper = _keeper(tmp_path)
    with keeper:
        keeper._pool.submit(go_on.wait, 60)  # so that writing begins when the model has changed
        keeper.save(model, state)
        assert not keeper.due, "while one is written, none is due"
        assert not (tmp_path / "latest").exists()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        state["momentum"].zero_()
        go_on.set()
        keeper.flush()
        assert keeper.due
    loaded, stored = load_checkpoint(tmp_path / "latest")
    assert _same(loaded, small_model(1))  # type: ignore[arg-type]
    assert stored is not None
    assert stored["momentum"].tolist() == [3.0] * 4


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_save_raises_is_raised_in_training(tmp_path: Path, asynchronous: bool) -> None:
    def fail(_: Path) -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError), _keeper(tmp_path, asynchronous=asynchronous) as keeper:
        keeper.save(small_model(1), _state(1), write_more=fail)
        keeper.save(small_model(1), _state(2))


@given(
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True).map(sorted),
    keep_last=st.integers(1, 4),
    every=st.integers(0, 5),
    best=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
def test_exactly_what_the_rules_name_is_kept(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[int],
    keep_last: int,
    every: int,
    best: int,
    data: st.DataObject,
) -> None:
    directory = tmp_path_factory.mktemp("kept")
    scores = data.draw(st.lists(st.integers(-3, 3), min_size=len(steps), max_size=len(steps)))
    rules: dict[str, Any] = {"keep_last": keep_last, "keep_every_steps": every, "keep_best": best}
    with _keeper(directory, asynchronous=False, **rules) as keeper:
        for step, score in zip(steps, scores, strict=True):
            keeper.save(None, _state(step, score=score))
    older = steps[:-1]
    wanted = set(steps[-keep_last:]) | {step for step in older if every and step % every == 0}
    scored = dict(zip(steps, scores, strict=True))
    kept = {entry.step for entry in History(directory / "latest").entries()} | {steps[-1]}
    assert wanted <= kept
    others = sorted(set(older) - kept, key=lambda step: scored[step])
    for step in kept - wanted:
        assert not others or scored[step] >= scored[others[-1]], "a better one was deleted"
    assert len(kept - wanted) <= best
    assert best == 0 or len(older) == 0 or max(older, key=lambda s: (scored[s], s)) in kept


def test_the_last_whole_one_is_found_and_others_are_counted_by_reason(tmp_path: Path) -> None:
    metrics = MemorySink()
    with _keeper(tmp_path, keep_last=3) as keeper:
        for step in (1, 2, 3):
            keeper.save(small_model(step), _state(step))
    history = History(tmp_path / "latest").entries()
    (history[-1].path / "model.safetensors").unlink()
    state = tmp_path / "latest" / "state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    (tmp_path / ".latest.partial").mkdir()
    found = find_resumable(tmp_path / "latest", metrics, SilentObserver())
    assert found == history[0].path
    assert metrics.rows == [
        {"kind": "resume", "step": 1, "skipped_damaged": 1, "skipped_missing": 1, "skipped_unfinished": 1}
    ]
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == [history[-1].path.name, "latest"]
    with _keeper(tmp_path, keep_last=3) as keeper:
        keeper.save(small_model(4), _state(4))
    assert _steps(tmp_path) == [1, 4]


def test_what_a_killed_save_had_replaced_is_found_where_the_newer_one_is_damaged(tmp_path: Path) -> None:
    metrics, latest = MemorySink(), tmp_path / "latest"
    with _keeper(tmp_path, keep_last=3) as keeper:
        for step in (1, 2):
            keeper.save(small_model(step), _state(step))
    save_checkpoint(latest, small_model(3), _state(3), retire=lambda _: None)  # killed before it retired 2
    (latest / "state.pt").write_bytes(b"")
    assert find_resumable(latest, metrics, SilentObserver()) == latest
    assert metrics.rows == [{"kind": "resume", "step": 2, "skipped_damaged": 1}]
    assert _steps(tmp_path) == [1, 2]
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["latest"]
    with _keeper(tmp_path, keep_last=3) as keeper:
        keeper.save(small_model(4), _state(4))
    assert _steps(tmp_path) == [1, 2, 4]


def _save_until_killed(directory: Path, num_syncs: int) -> None:
    """Saves step after step, and dies at the n-th sync of a file, in the thread that writes."""
    left, fsync = [num_syncs], os.fsync

    def dying_fsync(descriptor: int) -> None:
        fsync(descriptor)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = dying_fsync
    with _keeper(directory) as keeper:
        for step in range(1, 10):
            keeper.save(small_model(step), _state(step))


@pytest.mark.slow
def test_a_save_in_flight_at_a_kill_costs_nothing_that_was_saved_before(tmp_path: Path) -> None:
    syncs = 6  # four files, their directory, the one above
    for number in range(1, 2 * syncs + 1):
        directory = tmp_path / str(number)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                _save_until_killed(directory, number)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = find_resumable(directory / "latest", MemorySink(), SilentObserver())
        if number < syncs:
            assert found is None
            continue
        assert found is not None
        model, state = load_checkpoint(found)
        assert state is not None
        assert state["step"] == number // syncs
        assert _same(model, small_model(state["step"]))  # type: ignore[arg-type]
        with _keeper(directory) as keeper:
            keeper.save(small_model(7), _state(7))
        assert _steps(directory)[-1] == 7


def test_older_ones_that_rot_end_no_run(tmp_path: Path) -> None:
    with _keeper(tmp_path, keep_last=3, keep_best=1) as keeper:
        for step in (1, 2, 3):
            keeper.save(None, _state(step, score=-step))
        keeper.flush()
        (History(tmp_path / "latest").entries()[0].path / "state.pt").write_bytes(b"")
        keeper.save(None, _state(4, score=-4))
        keeper.flush()
        assert [kept.step for kept in History(tmp_path / "latest").entries()] == [2, 3]
        (tmp_path / "latest" / "state.pt").write_bytes(b"")
        keeper.save(None, _state(5, score=-5))
        keeper.flush()
        assert [kept.step for kept in History(tmp_path / "latest").entries()] == [2, 3]
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["latest"]


def test_a_score_that_is_no_number_takes_no_better_ones_place(tmp_path: Path) -> None:
    with _keeper(tmp_path, keep_last=1, keep_best=1) as keeper:
        for step, score in enumerate((0.9, float("nan"), 0.1, float("nan"), 0.2), 1):
            keeper.save(None, _state(step, score=score))
    assert [kept.step for kept in History(tmp_path / "latest").entries()] == [1]


def test_what_a_network_file_system_keeps_of_open_files_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir, refused = os.rmdir, []

    def refuse_once(path: Any, **more: Any) -> None:
        if not refused:
            refused.append(path)
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmdir(path, **more)

    with _keeper(tmp_path, keep_last=1) as keeper:
        keeper.save(None, _state(1))
        keeper.flush()
        monkeypatch.setattr(os, "rmdir", refuse_once)
        keeper.save(None, _state(2))
        keeper.flush()
        assert refused and len(History(tmp_path / "latest").entries()) == 1
        keeper.save(None, _state(3))
        keeper.flush()
    assert History(tmp_path / "latest").entries() == []


def test_nothing_whole_is_refused_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    assert find_resumable(tmp_path / "latest", MemorySink(), SilentObserver()) is None
    save_checkpoint(tmp_path / "latest", small_model(1), _state(1))
    (tmp_path / "latest" / DIGESTS).write_text("{")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="damaged, and there is no other") as raised:
            find_resumable(tmp_path / "latest", MemorySink(), SilentObserver())
        assert raised.value.fix is not None and "older checkpoint" not in raised.value.fix
    assert [flaw.flaw for flaw in find_flaws(tmp_path / "latest")] == [Flaw.DAMAGED]


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of its own, which is soon full."""
    script = f"mount -t tmpfs -o size={SIZE} tmpfs /mnt && echo ready && exec sleep 600"
    holder = subprocess.Popen(["unshare", "-rm", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip("this machine makes no file systems for users")
        yield Path(f"/proc/{holder.pid}/root/mnt")
    finally:
        holder.kill()
        holder.wait()


def filled(directory: Path, left: int) -> Path:
    """Takes up all but `left` bytes."""
    free = os.statvfs(directory)
    path = directory / "filler"
    path.write_bytes(bytes(free.f_bavail * free.f_bsize - left))
    return path


@pytest.mark.parametrize("room_for", ["nothing", "half of the model", "the model"])
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(small_disk: Path, room_for: str) -> None:
    metrics = MemorySink()
    with _keeper(small_disk, metrics) as keeper:
        keeper.save(small_model(1), _state(1))
        keeper.flush()
        model_bytes = (small_disk / "latest" / "model.safetensors").stat().st_size
        left = {"nothing": 0, "half of the model": model_bytes // 2, "the model": model_bytes + 16384}
        filler = filled(small_disk, left[room_for])
        big = _state(2) | {"more": torch.zeros(20_000)}
        keeper.save(small_model(2), big)
        with pytest.raises(ResourceError, match="disk is full"):
            keeper.flush()
        assert not (small_disk / ".latest.partial").exists(), "what is half-written makes room"
        loaded, _ = load_checkpoint(small_disk / "latest")
        assert _same(loaded, small_model(1))  # type: ignore[arg-type]
        keeper.save(small_model(3), big)  # goes on
        filler.unlink()
        keeper.save(small_model(4), _state(4))
        keeper.flush()
    assert _steps(small_disk)[-1] == 4
    assert [row for row in metrics.rows if "failed_disk_full" in row]


def test_a_disk_too_full_for_the_history_ends_no_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, is_full = Path.mkdir, [True]

    def mkdir_if_there_is_room(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name == "history" and is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir_if_there_is_room)
    with _keeper(tmp_path, keep_last=4) as keeper:
        for step in (1, 2):
            keeper.save(None, _state(step))
            keeper.flush()
        keeper.save(None, _state(3))
        with pytest.raises(ResourceError, match="disk is full"):
            keeper.flush()
        is_full[0] = False
        keeper.save(None, _state(4))
        keeper.flush()
    steps = [kept.step for kept in History(tmp_path / "latest").entries()]
    assert steps == [1, 2] and (load_state(tmp_path / "latest") or {})["step"] == 4
