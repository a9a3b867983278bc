"""Task directories with `[[steps]]`: settings of each step, and those inherited from the task."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from etude.environment.wire import task_document, task_of
from etude.errors import TaskError
from etude.records import Artifact, CollectCommand, HealthCheck, Task
from etude.tasks.harbor import read_harbor
from tests.tasks.harbor_tasks import Files, write_task

TWO = """[agent]
timeout_sec = 90
[verifier]
timeout_sec = 30
user = "checker"
env = { A = "task", B = "task" }
[[verifier.collect]]
command = "dump"
[[steps]]
name = "first"
min_reward = 0.5
[[steps]]
name = "second"
min_reward = { style = 1 }
[steps.agent]
timeout_sec = 20
[steps.verifier]
timeout_sec = 7
user = 0
env = { B = "step" }
[steps.healthcheck]
command = "true"
retries = 1
"""
STEPS: Files = {
    "steps/first/instruction.md": "# canary\n\nBegin.\n",
    "steps/second/instruction.md": "Go on.\n",
    "steps/second/tests/lib.sh": "step\n",
    "tests/lib.sh": "task\n",
    "steps/second/workdir/setup.sh": "true\n",
    "steps/second/workdir/data/a.txt": "a\n",
}


def read_steps(directory: Path, toml: str = TWO, image: str = "ubuntu:24.04", **more: str) -> Task:
    directory.mkdir(exist_ok=True)
    task = write_task(directory, toml=toml, files={**STEPS, **more}, image=image)
    (task / "instruction.md").unlink(missing_ok=True)
    return read_harbor(task)


def contents(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {row.name: tar.extractfile(row) for row in tar if row.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file}


def test_a_step_has_its_own_fields_and_else_its_tasks(tmp_path: Path) -> None:
    task = read_steps(tmp_path)
    first, second = task.steps
    assert (first.name, first.instruction, second.instruction) == ("first", "Begin.", "Go on.")
    assert (task.instruction, task.verifier, task.solution) == ("Begin.", first.verifier, first.solution)
    assert task.step_rewards == "mean"
    assert (first.min_reward, second.min_reward) == ({"reward": 0.5}, {"style": 1.0})
    assert (first.agent_s, second.agent_s) == (90.0, 20.0)
    machines = [task.at_step(n).machine for n in (0, 1)]
    assert [machine.agent_s for machine in machines if machine] == [90.0, 20.0]
    assert (first.health, second.health) == (None, HealthCheck("true", retries=1))
    assert (first.verifier.timeout_s, second.verifier.timeout_s) == (600.0, 7.0), "as in Harbor"
    assert (first.verifier.user, second.verifier.user) == ("checker", "0")
    assert first.verifier.env == {"A": "task", "B": "task"}
    assert second.verifier.env == {"A": "task", "B": "step"}
    assert first.verifier.collect == second.verifier.collect == (CollectCommand("dump"),)
    assert (first.files, first.has_setup, second.has_setup) == (b"", False, True)
    assert contents(second.files) == {"setup.sh": "true\n", "data/a.txt": "a\n"}


def test_a_steps_tests_lie_over_its_tasks_and_its_solution_in_their_place(tmp_path: Path) -> None:
    first, second = read_steps(tmp_path).steps
    assert contents(first.verifier.archive)["lib.sh"] == "task\n"
    assert contents(second.verifier.archive)["lib.sh"] == "step\n"
    assert contents(second.verifier.archive)["test.sh"] == contents(first.verifier.archive)["test.sh"]
    assert first.solution == second.solution, "the task's"
    own = {"steps/second/solution/solve.sh": "own\n"}
    first, second = read_steps(tmp_path, **own).steps
    assert first.solution is not None and "greeting" in contents(first.solution.archive)["solve.sh"]
    assert second.solution is not None and contents(second.solution.archive) == {"solve.sh": "own\n"}


def test_what_a_step_has_as_a_file_replaces_the_tasks_directory_of_that_name(tmp_path: Path) -> None:
    files = {"tests/data/a.txt": "a\n", "tests/data/b/c.txt": "c\n", "tests/database": "d\n"}
    first, second = read_steps(tmp_path, **files, **{"steps/second/tests/data": "one\n"}).steps
    assert contents(first.verifier.archive)["data/b/c.txt"] == "c\n"
    with tarfile.open(fileobj=io.BytesIO(second.verifier.archive)) as tar:
        assert tar.getnames() == ["data", "database", "lib.sh", "test.sh"]
    assert contents(second.verifier.archive)["data"] == "one\n"


def test_a_step_may_have_a_verifier_of_its_own(tmp_path: Path) -> None:
    separate = """artifacts = ["/app/all"]
[[steps]]
name = "first"
[[steps]]
name = "second"
artifacts = ["/app/more"]
[steps.verifier.environment]
memory_mb = 300
"""
    toml = "multi_step_reward_strategy = 'final'\n" + separate
    write_task(tmp_path, files=STEPS, image="ubuntu:24.04")
    text = (tmp_path / "task.toml").read_text()
    (tmp_path / "task.toml").write_text(f"{toml.partition('[[')[0]}{text}[[{toml.partition('[[')[2]}")
    task = read_harbor(tmp_path)
    first, second = (step.verifier for step in task.steps)
    assert task.step_rewards == "final"
    assert (first.machine, first.artifacts) == (None, ())
    assert second.machine is not None and second.machine.memory_bytes == 300 << 20
    assert [one.source for one in second.artifacts] == ["/logs/artifacts", "/app/all", "/app/more"]
    assert second.artifacts[0] == Artifact("/logs/artifacts")
    (tmp_path / "steps/second/tests/Dockerfile").write_text("FROM ubuntu:24.04\nCOPY . /tests\n")
    built = read_harbor(tmp_path).steps[1].verifier
    assert built.machine is not None and built.archive == b""
    assert (built.machine.docker_image, built.machine.context) == ("", "steps/second/tests")


@pytest.mark.parametrize(
    ("toml", "files", "said"),
    [
        ('[[steps]]\nname = "../x"', {}, "task.toml: steps.0.name"),
        ('[[steps]]\nname = "a."', {}, "task.toml: steps.0.name"),
        ('[[steps]]\nname = "one"\n[[steps]]\nname = "ONE"', {}, "task.toml: steps.name"),
        ('[[steps]]\nname = "first"\nmin_reward = nan', {}, "task.toml: steps.0.min_reward"),
        ('[[steps]]\nname = "first"\ncolour = 3', {}, "task.toml: steps.0.colour"),
        ('[[steps]]\nname = "third"', {}, "steps/third/instruction.md"),
        (TWO, {"steps/second/trajectory.json": "x"}, "steps/second/trajectory.json"),
        (TWO, {"steps/second/solution/notes": "x"}, "solution/solve.sh (step 'second')"),
        ('[metadata.etude]\ngrading = "values"\n[[steps]]\nname = "first"', {}, "task.toml: steps"),
        (
            '[[steps]]\nname = "first"\n[steps.verifier]\nenvironment_mode = "shared"\n'
            "[steps.verifier.environment]\ncpus = 1",
            {},
            "task.toml: steps.first.verifier.environment_mode",
        ),
        (
            '[[steps]]\nname = "first"\n[[steps.verifier.collect]]\ncommand = "true"\nuser = "db"',
            {},
            "task.toml: steps.first.verifier.collect.user",
        ),
    ],
)
def test_a_step_that_cannot_be_honoured_is_refused_by_its_field(
    tmp_path: Path, toml: str, files: dict[str, str], said: str
) -> None:
    with pytest.raises(TaskError) as caught:
        read_steps(tmp_path, toml, "host" if "values" in toml else "ubuntu:24.04", **files)
    assert caught.value.field is not None and caught.value.field.removesuffix(".float") == said


def test_a_strategy_without_steps_and_a_step_elsewhere_are_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "a")
    text = (tmp_path / "a/task.toml").read_text()
    (tmp_path / "a/task.toml").write_text(f'multi_step_reward_strategy = "final"\n{text}')
    with pytest.raises(TaskError, match=r"multi_step_reward_strategy: needs \[\[steps\]\]"):
        read_harbor(tmp_path / "a")
    read_steps(tmp_path / "b")
    (tmp_path / "b/steps").rename(tmp_path / "steps")
    (tmp_path / "b/steps").symlink_to(tmp_path / "steps")
    with pytest.raises(TaskError, match="leads out of the task directory"):
        read_harbor(tmp_path / "b")


def test_a_task_with_steps_crosses_the_wire_whole(tmp_path: Path) -> None:
    task = read_steps(tmp_path)
    assert task_of(json.loads(json.dumps(task_document(task)))) == replace(task, directory=None)
