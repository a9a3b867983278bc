import multiprocessing
from pathlib import Path

import pytest

from etude.config import RunConfig, parse_config
from etude.errors import ResourceError, RunDirectoryError
from etude.kit.durable import DRAFTS, write_bytes, write_json
from etude.observe import RunDirectory, run_directory
from tests.fakes.disk import full_disk


def config_in(directory: Path, **values: object) -> RunConfig:
    return parse_config({"runs_directory": str(directory / "runs"), "name": "demo", **values})


def test_a_new_run_holds_its_configuration_and_environment(tmp_path: Path) -> None:
    config = config_in(tmp_path, seed=7, rl={"num_steps": 3})
    run = RunDirectory.create(config)
    assert run.path == tmp_path / "runs" / "demo"
    assert run.config == config
    assert set(run.environment) == {"machine", "versions", "commit", "threads", "seed"}
    assert run.environment["seed"] == 7
    assert run.trajectories.is_dir()
    assert run.checkpoints.is_dir()
    assert [path.name for path in run.path.parent.iterdir()] == ["demo"]


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    RunDirectory.create(config_in(tmp_path))
    with pytest.raises(RunDirectoryError) as raised:
        RunDirectory.create(config_in(tmp_path, seed=1))
    assert raised.value.field == "name"
    assert "--resume" in str(raised.value)
    assert RunDirectory.open(tmp_path / "runs" / "demo").config.seed == 0


def test_a_run_in_progress_is_not_called_one_to_be_removed(tmp_path: Path) -> None:
    with RunDirectory.create(config_in(tmp_path)).lock(), pytest.raises(RunDirectoryError) as raised:
        RunDirectory.create(config_in(tmp_path))
    assert "another process is writing this run" in str(raised.value)
    assert "remove" not in str(raised.value)


def test_what_a_killed_process_left_goes_with_the_next_run(tmp_path: Path) -> None:
    left = tmp_path / "runs" / f"{DRAFTS}abc" / "demo" / "trajectories"
    left.mkdir(parents=True)
    assert RunDirectory.create(config_in(tmp_path)).trajectories.is_dir()
    assert not left.exists()


def test_a_directory_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunDirectoryError, match="cannot be created"):
        RunDirectory.create(config_in(tmp_path))


def test_opening_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such directory"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("name", ["MIN_FREE_DISK_BYTES", "MIN_FREE_MEMORY_BYTES"])
def test_too_little_disk_or_memory_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(run_directory, name, 1 << 60)
    with pytest.raises(ResourceError, match="a run needs"):
        RunDirectory.create(config_in(tmp_path))
    assert list((tmp_path / "runs").iterdir()) == []


def hold(path: Path, held: "multiprocessing.synchronize.Event") -> None:
    with RunDirectory.open(path).lock():
        held.set()
        held.wait(60)
        multiprocessing.Event().wait(60)


@pytest.mark.slow
def test_one_process_at_a_time_writes_a_run_and_its_death_frees_it(tmp_path: Path) -> None:
    run = RunDirectory.create(config_in(tmp_path))
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=hold, args=(run.path, held))
    holder.start()
    try:
        assert held.wait(60)
        with pytest.raises(RunDirectoryError, match="another process"), run.lock():
            pass
    finally:
        holder.kill()
        holder.join()
    with run.lock():
        pass
    with run.lock():
        pass


def test_the_environment_grows(tmp_path: Path) -> None:
    run = RunDirectory.create(config_in(tmp_path))
    run.update_environment({"threads": 2})
    assert run.environment["threads"] == 2
    assert run.environment["seed"] == 0


def test_a_missing_file_reads_as_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(config_in(tmp_path))
    assert run.read_json(run.report_file) is None
    run.report_file.write_text('{"name": ')
    with pytest.raises(RunDirectoryError) as raised:
        run.read_json(run.report_file)
    assert raised.value.field == "report.json"


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError):
        write_bytes(path, "text")  # type: ignore[arg-type]
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]


def test_a_full_disk_keeps_the_last_report_and_takes_the_next_when_there_is_room(tmp_path: Path) -> None:
    run = RunDirectory.create(config_in(tmp_path))
    run.write_report({"rl_steps": 1})
    with full_disk(4), pytest.warns(UserWarning, match="the report is not written"):
        run.write_report({"rl_steps": 2})
    assert run.read_json(run.report_file) == {"rl_steps": 1}
    run.write_report({"rl_steps": 3})
    assert run.read_json(run.report_file) == {"rl_steps": 3}
