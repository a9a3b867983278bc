"""Analysis of a project: its test files, and the packages that they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.environment.making.projects import read_project
from etude.errors import TaskError
from tests.sandbox.images.image_builders import write_tree

PACKAGE = {"prices/__init__.py": "RATE = 2\n"}
NAMED = '[project]\nname = "prices"\nversion = "1"\n'


@pytest.mark.parametrize(
    "settings",
    [
        {"pytest.ini": "[pytest]\npython_files = checks.py\ntestpaths = prices\n"},
        {"pyproject.toml": '[tool.pytest.ini_options]\npython_files = "checks.py"\ntestpaths = "prices"\n'},
        {"pyproject.toml": '[tool.pytest]\npython_files = ["checks.py"]\ntestpaths = ["prices/"]\n'},
        {"tox.ini": "[pytest]\npython_files =\n    checks.py\ntestpaths = prices\n"},
        {"setup.cfg": "[tool:pytest]\npython_files = checks.py\ntestpaths = prices\n"},
        {
            "pytest.ini": "[pytest]\npython_files = checks.py\ntestpaths = prices\n",
            "tox.ini": "[pytest]\npython_files = other.py\n",
        },
    ],
)
def test_tests_are_called_what_pytest_is_configured_to_look_for(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    tests = {"prices/checks.py": "def test(): pass\n", "more/checks.py": "def test(): pass\n"}
    project = read_project(write_tree(tmp_path, PACKAGE | tests | settings))
    assert project.tests == tests.keys()
    assert project.test_files == ("prices/checks.py",)
    assert project.sources == PACKAGE


def test_tasks_that_lie_in_their_project_are_no_part_of_it(tmp_path: Path) -> None:
    files = PACKAGE | {"test_prices.py": "def test(): pass\n"}
    before = read_project(write_tree(tmp_path, files))
    write_tree(tmp_path / "tasks", {".making/plan": "", "one/tests/test_a.py": "", "report.json": "{}"})
    assert read_project(tmp_path) == before


def test_where_pytest_looks_into_every_module_those_outside_of_tests_are_sources(tmp_path: Path) -> None:
    settings = {"pytest.ini": "[pytest]\npython_files = *.py\naddopts = -q --import-mode=importlib\n"}
    project = read_project(
        write_tree(tmp_path, PACKAGE | settings | {"tests/rates.py": "def test(): pass\n"})
    )
    assert (project.test_files, project.sources) == (("tests/rates.py",), PACKAGE)
    assert project.options == ("--import-mode=importlib",)


def test_a_project_without_tests_is_refused_with_the_names_that_were_looked_for(tmp_path: Path) -> None:
    settings = {"setup.cfg": "[tool:pytest]\npython_files = checks_*.py\n"}
    with pytest.raises(TaskError, match=r"no file is called checks_\*\.py"):
        read_project(write_tree(tmp_path, PACKAGE | settings))


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"pyproject.toml": NAMED + '[dependency-groups]\ntest = ["a>1", "ruff"]\n'}, ("a>1", "pytest")),
        (
            {
                "pyproject.toml": NAMED
                + '[project.optional-dependencies]\ntests = ["prices[more]"]\nmore = ["b"]\n'
            },
            ("b", "pytest"),
        ),
        ({"setup.cfg": "[options]\ninstall_requires =\n    c==1\n"}, ("c==1", "pytest")),
        ({"requirements-dev.txt": "-r base.txt\nd\n", "base.txt": "e  # why\n"}, ("e", "d", "pytest")),
        ({"tox.ini": "[testenv]\ndeps =\n    pytest-cov\n    f\n"}, ("f", "pytest")),
        (
            {"pyproject.toml": '[tool.poetry.dependencies]\npython = "^3.9"\ng = "^2.1"\n'},
            ("g>=2.1", "pytest"),
        ),
    ],
)
def test_requirements_are_those_of_the_first_place_that_names_some(
    tmp_path: Path, files: dict[str, str], found: tuple[str, ...]
) -> None:
    test = {"tests/test_rate.py": "def test(): pass\n"}
    assert read_project(write_tree(tmp_path, PACKAGE | test | files)).requirements == found
