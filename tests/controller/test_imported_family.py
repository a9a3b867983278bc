"""A family of tasks of the user's own, by the example of the document."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.controller.evaluation import load_suite
from etude.controller.families import open_family
from etude.errors import ConfigError, TaskError
from etude.store.trajectories import TrajectoryLog
from tests.cli.commands import etude
from tests.controller.running import run_here, tiny_config

_DOCUMENT = Path(__file__).parents[2] / "docs" / "tasks.md"
FAMILY = {"family": "swapped:Swapped", "options": {"most": 9}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current directory holds the document's module."""
    section = _DOCUMENT.read_text().partition("## A family of your own")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    (tmp_path / "swapped.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("swapped", None)


def test_a_run_trains_and_is_judged_on_it(tmp_path: Path) -> None:
    run, report = run_here(tiny_config(tmp_path, tasks=FAMILY))
    groups = list(TrajectoryLog(run.trajectories).read())
    assert groups
    assert all(group.members[0].id.task.startswith("swapped-") for group in groups)
    assert report["rl_steps"] == 2
    assert report["heldout_after"]["greedy"] is not None


def test_it_is_shown_and_its_split_is_a_suite(tmp_path: Path) -> None:
    settings = ("--set", "tasks.family=swapped:Swapped", "--set", "tasks.options.most=9")
    assert etude("tasks", "show", "1", *settings).stdout.startswith("swapped-2: fix test_take_away")
    (task,) = load_suite("heldout", 1, tiny_config(tmp_path, tasks=FAMILY))
    assert task.id == "swapped-1"
    with pytest.raises(ConfigError, match="neither a split of the family") as caught:
        load_suite("validation", 1, tiny_config(tmp_path, tasks=FAMILY))
    assert caught.value.fix == "one of heldout, or a directory of tasks"


def test_a_split_comes_before_a_directory_of_its_name(tmp_path: Path) -> None:
    module = "from swapped import Swapped\n\nclass Split(Swapped):\n    splits = ('own',)\n"
    (tmp_path / "split_family.py").write_text(module)
    (tmp_path / "own").mkdir()
    config = tiny_config(tmp_path, tasks={"family": "split_family:Split"})
    assert [task.id for task in load_suite("own", 1, config)] == ["swapped-1"]
    with pytest.raises(TaskError):
        load_suite("./own", 1, config)


def test_how_the_quickstarts_families_are_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "etude_quickstart.bug_fixes", raising=False)
    monkeypatch.setitem(sys.modules, "etude_quickstart", None)
    with pytest.raises(ConfigError) as caught:
        open_family(tiny_config(tmp_path))
    assert caught.value.fix == "install Étude again: pip install -e . (or make)"


def test_a_family_without_all_members_is_refused_by_their_names(tmp_path: Path) -> None:
    module = "class Partial:\n    splits = notes = acting = ()\n\n    def __init__(self, config): ...\n"
    (tmp_path / "partial.py").write_text(module)
    with pytest.raises(ConfigError, match="lacks documents, evaluation_tasks, scripted_session, ") as caught:
        open_family(tiny_config(tmp_path, tasks={"family": "partial:Partial"}))
    assert caught.value.field == "tasks.family"


def test_the_quickstarts_families_have_short_names(tmp_path: Path) -> None:
    names = [tiny_config(tmp_path, tasks={"family": name}).tasks.family for name in ("bug_fixes", "trails")]
    assert names == ["etude_quickstart.bug_fixes:BugFixes", "etude_quickstart.trail_family:Trails"]
    assert tiny_config(tmp_path).tasks.family == names[0]
    assert [type(open_family(tiny_config(tmp_path, tasks={"family": name}))).__name__ for name in names] == [
        "BugFixes",
        "Trails",
    ]


def test_it_reads_its_options(tmp_path: Path) -> None:
    (task,) = open_family(tiny_config(tmp_path, tasks=FAMILY)).evaluation_tasks("heldout", 1)
    assert "take_away(1, 0) == 1" in task.files["test_calc.py"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Swapped", "No module named 'no_such_module'"),
        ("swapped:Other", "no attribute 'Other'"),
        ("swapped:__name__", "cannot be called"),
    ],
)
def test_what_cannot_be_imported_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        open_family(tiny_config(tmp_path, tasks={"family": name}))
    assert caught.value.field == "tasks.family"


def test_a_word_that_is_no_family_is_refused_with_the_choice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be bug_fixes, trails, directory or MODULE:FUNCTION"):
        tiny_config(tmp_path, tasks={"family": "bugfixes"})


def test_options_belong_to_a_family_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a task family of your own"):
        tiny_config(tmp_path, tasks={"options": {"most": 9}})
