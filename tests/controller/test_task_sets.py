"""Sets of tasks are checked before they are played, once, and what fails is left out by name."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from etude.controller import task_sets
from etude.controller.families import open_family
from etude.controller.task_sets import CheckedTask, TaskChecks, check_task_set, load_task_set
from etude.environment.checking import TaskReport
from etude.environment.task_images import TaskImages
from etude.errors import TaskError
from etude.records import Task, TaskImage, TaskMachine
from etude.sandbox.containers.engine import EngineError
from etude.sandbox.local.doctor import find_problems
from etude.tasks.harbor import write_harbor
from etude_quickstart.generator import TaskGenerator
from etude_quickstart.memory_backend import MemoryBackend
from tests.cli.commands import etude
from tests.environment.target import TARGET
from tests.tasks.harbor_tasks import KINDS, REWARD_TEXT, write_task

NETWORK = """#!/bin/sh
python3 -c 'import urllib.request; urllib.request.urlopen("http://packages.example/", timeout=5)' || exit 1
echo 1 > /logs/verifier/reward.txt
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of these tests are nobody else's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(task_sets, "_loaded", {})


def test_runs_on_generated_tasks_do_not_import_the_code_of_images() -> None:
    program = "import sys, etude.controller.families; sys.exit('etude.sandbox.images' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def config(backend: str = "local", **tasks: Any) -> RunConfig:
    if backend == "local" and (problems := find_problems()):
        pytest.skip(f"no namespaces here: {problems}")
    return RunConfig.model_validate({"sandbox": {"backend": backend}, "tasks": tasks})


def reports(directory: Path, backend: str = "local") -> dict[str, CheckedTask]:
    return {one.name: one for one in check_task_set(directory, "DIR", config(backend))}


def test_ten_kinds_of_tasks_are_verified_and_said_to_be_forgeable(tmp_path: Path) -> None:
    for name, write in KINDS.items():
        write(tmp_path / "tasks" / name, "host")
    found = reports(tmp_path / "tasks")
    assert {name: one.report.reason for name, one in found.items()} == dict.fromkeys(KINDS)
    assert all("could write the reward itself" in one.report.forgeable[0] for one in found.values())


def test_hidden_tests_that_check_nothing_are_forgeable(tmp_path: Path) -> None:
    hidden = "from lib.tally import tally\n\ndef test_a():\n    assert tally([1]) == 1\n"
    loose = hidden + "\ndef test_b():\n    tally([1])\n"
    for name, text in (("closed", hidden), ("loose", loose)):
        task = replace(TARGET, id=name, hidden_files={"tests/test_hidden.py": text})
        write_harbor(task, tmp_path / "tasks" / name)
    found = reports(tmp_path / "tasks", "unisolated")
    assert found["closed"].report.forgeable == ()
    assert found["loose"].report.forgeable[0].startswith("tests/test_hidden.py::test_b: none of ")


def test_each_fault_of_a_task_is_found_with_its_reason(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    always = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
    changing = """#!/bin/sh
if [ -f greeting.txt ]; then echo "1.$(date +%N)"; else echo 0; fi > /logs/verifier/reward.txt
"""
    write_task(tasks / "always", always)
    write_task(tasks / "changing", changing)
    write_task(tasks / "network", NETWORK)
    write_task(tasks / "no-solution", solve=None)
    write_task(tasks / "no-tests", toml="", solve="#!/bin/sh\ntrue\n")
    write_task(tasks / "unable", toml="", solve="#!/bin/sh\necho no compiler >&2\nexit 3\n")
    write_task(tasks / "silent", "#!/bin/sh\n[ -f greeting.txt ] && echo 1 > /logs/verifier/reward.txt\n")
    write_task(tasks / "slow", solve="#!/bin/sh\nsleep 60\n", toml="[agent]\ntimeout_sec = 0.5\n")
    write_task(tasks / "refused", toml="gpus = 1\n")
    write_task(tasks / "no-image", image="nobody/has-it:1")
    expected = {
        "always": "doing nothing earns 1",
        "changing": "its rewards differ between two runs",
        "network": "its reference solution fails: tests/test.sh wrote no reward and ended with 1",
        "no-solution": "has no reference solution",
        "no-tests": "its reference solution fails: tests/test.sh gave 0",
        "unable": "tests/test.sh gave 0; solution/solve.sh said: no compiler ended with 3",
        "silent": "doing nothing earns no reward, not 0",
        "slow": "timeout: solution/solve.sh did not end within 0.5 s",
        "refused": "task.toml: environment.gpus: is not supported; received 1",
        "no-image": "no such base image",
    }
    found = {name: one.report.reason or "" for name, one in reports(tasks).items()}
    assert {name: reason for name, reason in found.items() if expected[name] not in reason} == {}
    assert set(found) == set(expected)


def test_tasks_that_are_graded_by_values_are_checked_too(tmp_path: Path) -> None:
    tasks, task = tmp_path / "tasks", TaskGenerator(0).task(3)
    write_harbor(task, tasks / "right")
    write_harbor(replace(task, id="solved", files={**task.files, **task.solution_files}), tasks / "solved")
    write_harbor(replace(task, id="wrong", solution_files=dict(task.files)), tasks / "wrong")
    found = {name: one.report for name, one in reports(tasks, "unisolated").items()}
    assert (found["right"].reason, found["right"].forgeable) == (None, ())
    assert found["solved"].reason == "doing nothing earns 1"
    assert (found["wrong"].reason or "").startswith("its reference solution fails: ")


def test_tasks_without_a_solution_are_taken_where_none_is_required(tmp_path: Path) -> None:
    always = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "always", always, solve=None)
    write_task(tmp_path / "open", solve=None)
    taken = config(require_solution=False)
    for _ in range(2):  # what is kept of the first time does not count where a solution is required
        verified, words = load_task_set(tmp_path, "DIR", taken)
        assert [task.id for task in verified] == ["open"]
        assert any(
            line == "  1 have no solution, so it is not known whether they can be solved" for line in words
        )
        assert any("always: doing nothing earns 1" in line for line in words)
        with pytest.raises(TaskError, match="require_solution = false"):
            load_task_set(tmp_path, "DIR", config())


def test_what_makes_no_task_of_a_directory_is_its_reason(tmp_path: Path) -> None:
    write_harbor(replace(TARGET, id="right"), tmp_path / "right")
    write_task(tmp_path / "crlf", REWARD_TEXT.replace("\n", "\r\n"))
    write_task(tmp_path / "empty", files={"instruction.md": " \n"})
    for name, file in (("bare", "instruction.md"), ("tests-only", "tests/test.sh"), ("other", "notes.md")):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text("x\n")
    found = {name: one.report.reason or "" for name, one in reports(tmp_path, "unisolated").items()}
    assert found.keys() == {"right", "crlf", "empty", "bare", "tests-only"}
    assert found["right"] == ""
    assert "tests/test.sh: has CRLF line ends" in found["crlf"]
    assert "instruction.md: is empty" in found["empty"]
    assert all("task.toml: file is missing" in found[name] for name in ("bare", "tests-only"))


def test_of_two_tasks_with_one_id_the_second_is_left_out_by_name(tmp_path: Path) -> None:
    for name in ("copy", "one"):
        write_harbor(TaskGenerator(0).task(3), tmp_path / name)
    found = {name: one.report.reason or "" for name, one in reports(tmp_path, "unisolated").items()}
    assert found["copy"] == ""
    assert "copy has the same id" in found["one"]
    verified, _ = load_task_set(tmp_path, "DIR", config("unisolated"))
    assert [Path(task.directory).name for task in verified] == ["copy"]


def test_a_script_is_not_run_where_nothing_is_isolated(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks/one")
    (found,) = reports(tmp_path / "tasks", "unisolated").values()
    assert "unisolated" in (found.report.reason or "")


def test_what_was_checked_is_not_checked_again_until_it_changes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_task(tmp_path / "tasks" / name)
    first, again = reports(tmp_path / "tasks"), reports(tmp_path / "tasks")
    assert first == again, "the seconds that it took, too"
    write_task(tmp_path / "tasks/two", "#!/bin/sh\ntrue\n")
    changed = reports(tmp_path / "tasks")
    assert changed["one"] == first["one"]
    assert changed["two"].report.reason is not None


def test_a_run_leaves_out_what_fails_or_does_not_start(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for name in ("one", "two"):
        write_task(tasks / name)
    write_task(tasks / "broken", "#!/bin/sh\ntrue\n")
    verified, words = load_task_set(tasks, "tasks.directory", config())
    assert [task.id for task in verified] == ["one", "two"]
    forgeable = "an agent could forge the verdict on 2 of these (100%)"
    assert words[0] == f"tasks: 2 of 3 in {tasks} are verified; {forgeable}"
    assert words[1].startswith("  left out: broken: its reference solution fails: ")
    assert words[2].startswith("  forgeable: one: tests/test.sh::reward: the agent's code")
    family = open_family(config(family="directory", directory=str(tasks)))
    assert list(family.notes) == words
    assert len(family.evaluation_tasks("heldout", 9)) == 1
    with pytest.raises(TaskError, match=r"1 of 3 tasks are not verified:\n  broken"):
        load_task_set(
            tasks, "tasks.directory", config(family="directory", directory=str(tasks), check="stop")
        )


def test_a_set_of_which_nothing_is_verified_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks/broken", "#!/bin/sh\ntrue\n")
    with pytest.raises(TaskError, match="1 of 1 tasks are not verified"):
        load_task_set(tmp_path / "tasks", "--suite", config())


def test_the_command_lists_what_fails_and_what_is_forgeable(tmp_path: Path) -> None:
    config()  # skips where there are no namespaces
    tasks = tmp_path / "tasks"
    write_harbor(replace(TARGET, id="closed"), tasks / "closed")
    write_task(tasks / "script")
    right = etude("tasks", "check", str(tasks))
    assert right.exit_code == 0
    assert right.stdout.startswith("script: forgeable: tests/test.sh::reward: the agent's code")
    write_task(tasks / "broken", "#!/bin/sh\ntrue\n")
    found = etude("tasks", "check", str(tasks), "--json")
    assert found.exit_code == 1
    rows = {row["name"]: row for row in json.loads(found.stdout)}
    assert {name: row["verified"] for name, row in rows.items()} == {
        "broken": False,
        "closed": True,
        "script": True,
    }
    assert set(rows["broken"]) == {"name", "verified", "id", "reason", "forgeable", "duration_s"}


def test_a_failure_is_checked_again_by_the_next_command_and_a_pass_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "tasks/one")
    write_task(tmp_path / "tasks/two")
    failed = "timeout: tests/test.sh did not end within 600 s"
    reasons = [None, failed, None]

    async def check(tasks: Sequence[Task], *others: Any) -> list[TaskReport]:
        found = [TaskReport(task.id, reasons.pop(0)) for task in tasks]
        for report in found:
            others[-1](report)
        return found

    monkeypatch.setattr(task_sets, "check_tasks", check)

    def load_as_a_new_command() -> list[int]:
        """A run asks for its tasks more than once."""
        monkeypatch.setattr(task_sets, "_loaded", {})
        loaded = [load_task_set(tmp_path / "tasks", "DIR", config("unisolated")) for _ in range(2)]
        assert loaded[0] == loaded[1]
        return [len(tasks) for tasks, _ in loaded]

    assert load_as_a_new_command() == [1, 1]
    assert load_as_a_new_command() == [2, 2]
    assert load_as_a_new_command() == [2, 2]


def test_a_task_that_was_checked_as_it_was_made_is_known_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(_: TaskImages, task: Task) -> Task:
        image = TaskImage(f"harbor/{task.directory}", ("layer",), {}, "/work", "")
        return replace(task, machine=TaskMachine(docker_image="python", image=image))

    async def check(tasks: Sequence[Task], *others: Any) -> list[TaskReport]:
        asked.extend(task.id for task in tasks)
        [found] = [TaskReport(task.id, None, ("a test",)) for task in tasks]
        others[-1](found)
        return [found]

    asked: list[str] = []
    monkeypatch.setattr(TaskImages, "find", find)
    monkeypatch.setattr(task_sets, "check_tasks", check)
    write_task(tmp_path / "draft/one", image="python")
    checks = TaskChecks(config("unisolated"))
    report = asyncio.run(checks.check_directory(tmp_path / "draft/one", MemoryBackend()))
    (tmp_path / "draft").rename(tmp_path / "tasks")
    assert reports(tmp_path / "tasks", "unisolated")["one"].report == report
    assert asked == [report.id]


def test_a_check_that_is_cut_off_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write_task(tmp_path / "tasks" / name)
    asked: list[list[str]] = []

    async def check(tasks: Sequence[Task], *others: Any) -> list[TaskReport]:
        asked.append([task.id for task in tasks])
        others[-1](TaskReport(tasks[0].id, None))
        raise KeyboardInterrupt

    monkeypatch.setattr(task_sets, "check_tasks", check)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            reports(tmp_path / "tasks", "unisolated")
    assert asked == [["one", "two"], ["two"]]


def test_a_task_that_cannot_be_read_or_whose_image_fails_is_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("circle", "engine", "locked"):
        write_task(tmp_path / "tasks" / name, image="python")
    write_harbor(replace(TARGET, id="right"), tmp_path / "tasks/right")
    (tmp_path / "tasks/circle/tests/a").symlink_to("a")
    (tmp_path / "tasks/locked/tests/secret").write_text("")
    read_bytes, find = Path.read_bytes, TaskImages.find

    def read(path: Path) -> bytes:
        if path.name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    async def find_or_fail(self: TaskImages, task: Task) -> Task:
        if task.id == "engine":
            raise EngineError("does not answer")
        return await find(self, task)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(TaskImages, "find", find_or_fail)
    found = {name: one.report.reason or "" for name, one in reports(tmp_path / "tasks", "unisolated").items()}
    assert found["right"] == ""
    assert "tests/a: is a link" in found["circle"]
    assert "tests/secret: cannot be read: Permission denied" in found["locked"]
    assert "does not answer" in found["engine"]


def test_an_interrupt_ends_a_check_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path / "tasks/one")
    ends: list[str] = []

    async def check(*_: Any) -> list[TaskReport]:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(20)
            return []
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    monkeypatch.setattr(task_sets, "check_tasks", check)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests have left there
    try:
        with pytest.raises(KeyboardInterrupt):
            reports(tmp_path / "tasks", "unisolated")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ends == ["cancelled"]
