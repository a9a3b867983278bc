"""Harbor directories: round trip, a verifier that runs, and errors that name the fix."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.records import Task
from etude.tasks.harbor import read_harbor, write_harbor
from etude_quickstart.generator import TaskGenerator
from tests.tasks.harbor_tasks import write_task

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NAMES = st.text("abcxyz_-. $'\"é", min_size=1, max_size=8).filter(lambda name: name.strip(". ") == name)
PATHS = NAMES
FILES = st.dictionaries(PATHS.map(lambda path: f"lib/{path}"), TEXT, max_size=3)


@given(
    st.builds(
        Task,
        id=st.text(min_size=1, max_size=10, alphabet='abc-019"\\'),
        instruction=TEXT.filter(str.strip),
        files=FILES,
        hidden_files=FILES,
        solution_files=FILES,
        test_paths=st.lists(PATHS, max_size=2).map(tuple),
        hidden_test_paths=st.lists(PATHS, max_size=2).map(tuple),
        metadata=st.dictionaries(
            TEXT.filter(lambda key: key != "etude"),
            TEXT | st.integers() | st.booleans() | st.floats(allow_nan=False),
            max_size=4,
        ),
        user_facts=st.lists(TEXT, max_size=2).map(tuple),
    )
)
def test_any_task_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, task: Task) -> None:
    directory = tmp_path_factory.mktemp("tasks") / "task"
    write_harbor(task, directory)
    back = read_harbor(directory)
    assert back.directory == str(directory)
    assert replace(back, directory=None) == task


@pytest.fixture
def written(tmp_path: Path) -> Path:
    directory = tmp_path / "task"
    write_harbor(TaskGenerator(0).task(5), directory)
    return directory


def run_verifier(directory: Path, workspace: Path, logs: Path) -> str:
    """Runs `tests/test.sh` with its absolute paths moved under a temporary directory."""
    script = (directory / "tests/test.sh").read_text()
    script = script.replace("/workspace", str(workspace)).replace("/logs", str(logs))
    script = script.replace("python -m pytest", f"{sys.executable} -m pytest")
    script = script.replace('"$(dirname "$0")', f'"{directory / "tests"}')
    # The solution may change a file within the second in which its bytecode was written.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(["sh", "-c", script], check=True, capture_output=True, env=environment)
    return (logs / "verifier/reward.txt").read_text().strip()


def test_the_verifier_tells_right_from_wrong(written: Path, tmp_path: Path) -> None:
    workspace, logs = tmp_path / "work", tmp_path / "logs"
    subprocess.run(["cp", "-R", written / "environment/workspace", workspace], check=True)
    assert run_verifier(written, workspace, logs) == "0"
    solve = (written / "solution/solve.sh").read_text().replace("/workspace", str(workspace))
    solve = solve.replace('"$(dirname "$0")', f'"{written / "solution"}')
    subprocess.run(["sh", "-c", solve], check=True)
    assert run_verifier(written, workspace, logs) == "1"


def test_hidden_tests_and_solution_are_not_in_the_image(written: Path) -> None:
    task = TaskGenerator(0).task(5)
    names = {path.name for path in (written / "environment").rglob("*") if path.is_file()}
    assert "test_hidden.py" not in names
    path = next(iter(task.solution_files))
    assert (written / "environment/workspace" / path).read_text() == task.files[path]
    assert os.access(written / "tests/test.sh", os.X_OK)


def test_an_existing_directory_is_not_overwritten(written: Path) -> None:
    with pytest.raises(TaskError, match="exists already"):
        write_harbor(TaskGenerator(0).task(6), written)
    assert read_harbor(written).id == "train-0-5"


def test_nothing_is_left_of_a_task_that_cannot_be_written(tmp_path: Path) -> None:
    task = replace(TaskGenerator(0).task(0), files={"lib/a.py": "\ud800"})
    with pytest.raises(TaskError, match="not Unicode"):
        write_harbor(task, tmp_path / "task")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../a.py", "/etc/passwd", "a/../../b", "./a.py", "a//b", "."])
def test_paths_that_are_not_plain_are_refused_when_writing(tmp_path: Path, path: str) -> None:
    with pytest.raises(TaskError, match=r"leads out|not a plain path"):
        write_harbor(replace(TaskGenerator(0).task(0), files={path: ""}), tmp_path / "task")


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).write_bytes(data)

    return damage


def _set_toml(text: str) -> Callable[[Path], None]:
    return _write("task.toml", text.encode())


def _remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _link(name: str, target: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (_remove("instruction.md"), "instruction.md"),
        (_remove("task.toml"), "task.toml"),
        (_remove("tests/test.sh"), "tests/test.sh"),
        (_set_toml("[task\n"), "task.toml"),
        (_set_toml("metadata = 3\n"), "task.toml: metadata"),
        (_set_toml("[task]\nname = 3\n"), "task.toml: task.name"),
        (_set_toml('[metadata.etude]\nallowed_paths = "lib"\n'), "task.toml: metadata.etude.allowed_paths"),
        (_set_toml('[metadata.etude]\ntest_paths = ["../a"]\n'), "task.toml: metadata.etude.test_paths"),
        (_link("environment/workspace/passwd", "/etc/passwd"), "environment/workspace/passwd"),
        (_link("tests/hidden/gone.py", "nowhere"), "tests/hidden/gone.py"),
        (
            lambda directory: (directory / "solution/files/x").write_bytes(b"\xff") and None,
            "solution/files/x",
        ),
        (_write("tests/hidden/test_\udcff.py", b""), "a name in tests/hidden"),
    ],
)
def test_a_bad_directory_is_named_with_field_and_fix(
    written: Path, damage: Callable[[Path], None], field: str
) -> None:
    damage(written)
    with pytest.raises(TaskError) as caught:
        read_harbor(written)
    assert caught.value.field == field
    assert caught.value.fix


def test_a_directory_of_other_makers_is_graded_by_its_own_script(tmp_path: Path) -> None:
    write_task(tmp_path, files={"instruction.md": "<!-- canary 1 -->\n\nMend it.\n"})
    toml = tmp_path / "task.toml"
    toml.write_text(toml.read_text() + '[metadata]\ndifficulty = "easy"\ntags = ["a"]\n')
    task = read_harbor(tmp_path)
    assert (task.instruction, task.id, task.files) == ("Mend it.", tmp_path.name, {})
    assert (task.hidden_test_paths, task.allowed_paths) == ((), ("**",))
    assert task.metadata == {"difficulty": "easy"}
    assert task.verifier is not None and task.solution is not None and task.machine is not None
    with pytest.raises(TaskError, match="graded by a script"):
        write_harbor(task, tmp_path / "again")


def test_the_way_of_grading_is_one_of_two(written: Path) -> None:
    toml = written / "task.toml"
    text = toml.read_text(encoding="utf-8")
    toml.write_text(text.replace('grading = "values"', 'grading = "eye"'), encoding="utf-8")
    with pytest.raises(TaskError, match=r"metadata\.etude\.grading: .*'values', 'test_sh' or 'exams'"):
        read_harbor(written)
    toml.write_text(text.replace('grading = "values"\n', ""), encoding="utf-8")
    task = read_harbor(written)
    assert task.verifier is not None and task.hidden_test_paths == ()


def test_what_a_user_withholds_must_be_sentences(written: Path) -> None:
    toml = written / "task.toml"
    text = toml.read_text(encoding="utf-8")
    assert "user_facts" not in text
    toml.write_text(text.replace("[metadata.etude]", "[metadata.etude]\nuser_facts = [3]"), encoding="utf-8")
    with pytest.raises(TaskError, match="valid string"):
        read_harbor(written)
